"""The thread's comparison of what ranks have issued: digests in the store, once a second, and nothing that waits.

Each rank posts its digests (:meth:`CollectiveLog.digests`) and reads those of the next rank of each process group.
Where a digest after the same number of calls differs, it raises an alarm in the store. Every rank of the group then
posts the calls that it has kept, and gives up with the first call that differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import asdict, define, field

from shardwise.comm.collective_log import KEPT, Call, CollectiveLog
from shardwise.comm.failure_notes import Note, Wait, World
from shardwise.errors import RankDisagreementError

__all__ = ["compare_calls", "first_difference", "has_issued", "latest_post", "lines_by_rank", "post_calls"]

_EVERY = 1.0
"""Seconds between two comparisons: two or three requests to the store for each process group."""
_MANY = 256  # beyond so many ranks the time between two comparisons grows, so that the store does not have more to do
_PATIENCE = 3.0  # seconds for which a rank waits for the calls of others; one of them may have ended


@define(eq=False)
class _Posts:
    """What a rank has posted in a world, by the name of a log."""

    next_at: float = 0.0
    counts: dict[str, int] = field(factory=dict)
    alarms: int = 0
    rings: dict[str, float] = field(factory=dict)  # since when the kept calls are in the store


_posts: dict[str, _Posts] = {}


def compare_calls(world: World, now: float) -> None:
    """Post and compare if it is time, and give up where ranks have parted."""
    posts = _posts.setdefault(world.prefix, _Posts())
    is_early = world.steps.bit_length() > world.compared_steps.bit_length()  # a step whose number is a power of two
    if now < posts.next_at and not is_early and not posts.rings:
        return
    world.compared_steps = world.steps
    posts.next_at = now + _EVERY * max(1.0, world.size / _MANY)
    for log in tuple(world.logs.values()):
        if log.count:
            _post(world, posts, log)
            _compare_with_next(world, log)
    if world.store.add(f"{world.prefix}/alarms", 0) > posts.alarms or posts.rings:
        for log in tuple(world.logs.values()):
            if world.store.check([_key(world, "parted", log)]):
                _tell_apart(world, posts, log, now)


def _key(world: World, what: str, log: CollectiveLog, rank: int | None = None) -> str:
    return f"{world.prefix}/{what}/{log.name}" + ("" if rank is None else f"/{rank}")


def _post(world: World, posts: _Posts, log: CollectiveLog) -> None:
    count = log.count
    if posts.counts.get(log.name) != count:
        posts.counts[log.name] = count
        text = json.dumps({"count": count, "digests": log.digests(), "last": str(log.call(count))})
        world.store.set(_key(world, "calls", log, world.rank), text)


def post_calls(world: World) -> None:
    """Post what this rank has issued, because it issues nothing more."""
    posts = _posts.setdefault(world.prefix, _Posts())
    for log in tuple(world.logs.values()):
        _post(world, posts, log)


def has_issued(world: World, wait: Wait, rank: int) -> bool:
    """Whether a rank is known to have issued the collective that a thread of this rank waits for."""
    log = next((log for log in world.logs.values() if log.name == wait.group), None)
    if wait.kind != "collective" or log is None or rank not in log.ranks:
        return False
    return bool(latest_post(world, log, rank)["count"] >= wait.number > 0)


def latest_post(world: World, log: CollectiveLog, rank: int) -> Mapping[str, Any]:
    """What a rank has posted last of its calls: their number, digests, and the last call in words."""
    key = _key(world, "calls", log, rank)
    if not world.store.check([key]):
        return {"count": 0, "digests": {}, "last": ""}
    post: Mapping[str, Any] = json.loads(world.store.get(key))
    return post


def _compare_with_next(world: World, log: CollectiveLog) -> None:
    other = log.ranks[(log.ranks.index(world.rank) + 1) % len(log.ranks)]
    for number, digest in latest_post(world, log, other)["digests"].items():
        own = log.digest_after(int(number))
        if own is not None and own != digest:
            world.store.set(_key(world, "parted", log), "")
            world.store.add(f"{world.prefix}/alarms", 1)
            return


def _tell_apart(world: World, posts: _Posts, log: CollectiveLog, now: float) -> None:
    """Post the kept calls; with those of all ranks, or after some seconds with those that are there, give up."""
    if log.name not in posts.rings:
        posts.rings[log.name] = now
        text = json.dumps([asdict(call) for call in log.calls()])
        world.store.set(_key(world, "ring", log, world.rank), text)
    there = [rank for rank in log.ranks if world.store.check([_key(world, "ring", log, rank)])]
    if len(there) < len(log.ranks) and now - posts.rings[log.name] < _PATIENCE:
        return
    rings = {r: [Call(**call) for call in json.loads(world.store.get(_key(world, "ring", log, r)))] for r in there}
    number, calls = first_difference(rings)
    if number is None:
        return
    notes = world.read(list(log.ranks)).values()
    if world.own is not None or any(note.message and not note.is_end for note in notes):
        return  # an error of one rank is why they differ, and it says more
    lines = lines_by_rank({rank: f"{call}" for rank, call in calls.items()})
    if number == 0:
        lines = [f"the first that differs is older than the last {KEPT}, which each rank keeps"]
    found = f"the collectives of ranks {', '.join(map(str, log.ranks))} are not the same from number {number} on"
    world.give_up(
        Note(
            world.rank,
            "run the same collectives on every rank",
            RankDisagreementError.__name__,
            found,
            log.name,
            1,
            is_final=True,
            ranks_say=lines,
        )
    )


def lines_by_rank(texts: Mapping[int, str]) -> list[str]:
    """A line for each text, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return [f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}: {text}" for text, of in ranks.items()]


def first_difference(rings: Mapping[int, list[Call]]) -> tuple[int | None, dict[int, Call]]:
    """The number of the first call that is not the same on all ranks that have made it, and this call of each rank.

    The number is 0 where that call is no longer kept, and None where all are the same.
    """
    by_number: dict[int, dict[int, Call]] = {}
    for rank, calls in rings.items():
        for call in calls:
            by_number.setdefault(call.number, {})[rank] = call
    were_same = False
    for number in sorted(by_number):
        calls_now = by_number[number]
        if len({call.digest for call in calls_now.values()}) > 1:
            return (number if were_same or number == 1 else 0), calls_now
        were_same = were_same or len(calls_now) > 1
    return None, {}
