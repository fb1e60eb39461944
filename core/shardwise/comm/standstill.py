"""Ranks that wait for each other, or for too long: who waits where is in the store, and every rank ends with that.

A rank that has waited for a second writes what for. Where it waits longer it reads what the ranks that it misses wait
for. Ranks that wait for each other in a circle cannot go on, and give up as soon as each of them has said so again: a
rank that gets no time on a busy machine may seem to wait for what is over. A rank that is missing and does not wait may
still come, so such a wait ends by a limit (the setting ``wait-limit``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from attrs import asdict, define, field

from shardwise.comm.call_posts import latest_post, lines_by_rank
from shardwise.comm.call_sites import short_line, users_frame
from shardwise.comm.failure_notes import Note, Wait, World
from shardwise.comm.gone_processes import gone_rank
from shardwise.comm.thread_frames import frames_of_threads, stack_of
from shardwise.errors import RankDisagreementError, RankWaitError
from shardwise.settings import read_settings

__all__ = ["circle", "look_at_waits", "waits_for_this_rank"]

_SHOWN = 1.0  # seconds after which a rank writes what it waits for
_STANDS = 2.0  # seconds after which it reads what others wait for
_AGAIN = 2  # looks of every rank of a circle after it was first seen; a second or more apart
_ASKS = 10.0  # seconds after which it asks the others what they do, if the limit is not shorter


def _waits(values: Iterable[Any]) -> list[Wait]:
    """A converter for attrs: waits, some of them perhaps as they came from the store."""
    return [value if isinstance(value, Wait) else Wait(**value) for value in values]


@define
class Waiting:
    """What one rank waits for, how many collectives it has issued by group, and the last that it has compared before.
    ``serial`` changes with the waits.

    ``looks`` counts how often the rank has looked since, and still waited.
    """

    serial: int
    waits: list[Wait] = field(converter=_waits)
    counts: dict[str, int]
    looks: int = 0
    compared: dict[str, int] = field(factory=dict)

    def misses(self, others: Mapping[int, Waiting], rank: int) -> set[int]:
        """The waiting ranks among ``others`` that have not come to what this ``rank`` waits for."""
        return {
            other
            for wait in self.waits
            for other in wait.ranks
            if other != rank and other in others and not others[other].has_come(wait)
        }

    def has_come(self, wait: Wait) -> bool:
        """Whether this rank has issued, or also waits in, what another waits for."""
        if wait.kind == "torch":
            return any(own.kind == "torch" and own.group == wait.group for own in self.waits)
        if wait.kind == "comparison":  # a rank that has issued the collective without it does not come any more
            here = (wait.kind, wait.group, wait.number)
            is_there = any((own.kind, own.group, own.number) == here for own in self.waits)
            return is_there or self.compared.get(wait.group, 0) >= wait.number
        return self.counts.get(wait.group, 0) >= wait.number


@define(eq=False)
class _Looks:
    """What a rank has written and read of waits in a world."""

    serial: int = 0
    written: list[Wait] = field(factory=list)
    next_at: float = 0.0
    looks: int = 0  # since the waits began
    seen: dict[int, Waiting] = field(factory=dict)  # the ranks of a circle, when it was first seen
    asked: int = 0
    has_asked: bool = False


_looks: dict[str, _Looks] = {}


@cache
def _limit() -> float:
    return read_settings().wait_limit


def look_at_waits(world: World, now: float) -> None:
    """Write what this rank waits for, and give up for a rank that is gone, in a circle of ranks, or after the limit."""
    looks = _looks.setdefault(world.prefix, _Looks())
    _answer(world, looks)
    standing = [(since, wait) for _, since, wait in world.waits.values() if wait is not None and now - since >= _SHOWN]
    waits = [wait for _, wait in standing]
    if waits != looks.written:
        _looks[world.prefix] = looks = _Looks(looks.serial + 1, waits, asked=looks.asked)
        _write(world, looks)
    if not waits:
        return
    longest = now - min(since for since, _ in standing)
    if longest >= _STANDS and now >= looks.next_at:
        looks.next_at = now + max(1.0, longest / 4)
        looks.looks += 1
        _write(world, looks)
        gone = gone_rank(world, {rank for wait in waits for rank in wait.ranks})
        if gone is not None:
            world.give_up(gone)
            return
        _look_for_circle(world, looks)
    if world.failure is None and longest >= min(_ASKS, _limit() / 2) and not looks.has_asked:
        looks.has_asked = True
        world.store.add(f"{world.prefix}/asked", 1)
    if world.failure is None and longest >= _limit():
        _give_up_waiting(world, looks, min(standing, key=lambda pair: pair[0])[1], longest)


def _write(world: World, looks: _Looks) -> None:
    text = json.dumps(asdict(_own(world, looks))) if looks.written else ""
    world.store.set(f"{world.prefix}/waits/{world.rank}", text)


def _own(world: World, looks: _Looks) -> Waiting:
    counts = {log.name: log.count for log in world.logs.values()}
    return Waiting(looks.serial, looks.written, counts, looks.looks, dict(world.compared_at))


def _read(world: World, rank: int) -> Waiting | None:
    key = f"{world.prefix}/waits/{rank}"
    text = world.store.get(key) if world.store.check([key]) else b""
    return Waiting(**json.loads(text)) if text else None


def waits_for_this_rank(world: World, rank: int) -> str:
    """What another rank has waited for, a second or more, and this one has not come to; empty if there is nothing."""
    waiting = _read(world, rank)
    if waiting is None:
        return ""
    own = _own(world, _looks.setdefault(world.prefix, _Looks()))
    missed = [wait for wait in waiting.waits if world.rank in wait.ranks and not own.has_come(wait)]
    return f"{waiting.serial} {missed}" if missed else ""


def _look_for_circle(world: World, looks: _Looks) -> None:
    waiting = {world.rank: _own(world, looks)}
    missing = set(waiting)
    while missing:  # all that this rank waits for, and what those wait for
        reached = {other for rank in missing for wait in waiting[rank].waits for other in wait.ranks} - set(waiting)
        found = {rank: waits for rank in sorted(reached) if (waits := _read(world, rank)) is not None}
        waiting |= found
        missing = set(found)
    ring = {rank: waiting[rank] for rank in circle(waiting, world.rank)}
    before = looks.seen
    if {rank: one.serial for rank, one in ring.items()} != {rank: one.serial for rank, one in before.items()}:
        looks.seen = ring
    elif ring and all(one.looks >= before[rank].looks + _AGAIN for rank, one in ring.items()):
        # Ranks that wait as they should, for one of the circle, say where the others ought to be.
        says = {rank: f"waits in {waiting[rank].waits[0].text}" for rank in sorted(waiting)}
        _give_up(world, RankDisagreementError.__name__, "ranks wait for each other", says)


def circle(waiting: Mapping[int, Waiting], rank: int) -> set[int]:
    """The ranks that wait for a rank which waits for them, that rank among them; empty where no rank does."""
    misses = {other: one.misses(waiting, other) for other, one in waiting.items()}

    def reached(start: int) -> set[int]:
        found: set[int] = set()
        todo = set(misses[start])
        while todo:
            found |= todo
            todo = {further for other in todo for further in misses[other]} - found
        return found

    ahead = reached(rank)
    return {other for other in ahead if rank in reached(other)} if rank in ahead else set()


def _answer(world: World, looks: _Looks) -> None:
    """Write what the main thread does, if a rank that waits has asked since the last time."""
    if not world.logs or (asked := world.store.add(f"{world.prefix}/asked", 0)) == looks.asked:
        return
    looks.asked = asked
    stack = stack_of(frames_of_threads().get(threading.main_thread().ident or 0))
    frame = users_frame(stack[0] if stack else None)
    line = "no line of the program" if frame is None else short_line(frame.f_code, frame.f_lasti)
    world.store.set(f"{world.prefix}/does/{world.rank}", line)


def _give_up_waiting(world: World, looks: _Looks, wait: Wait, seconds: float) -> None:
    log = next((log for log in world.logs.values() if log.name == wait.group), None)
    says: dict[int, str] = {}
    for rank in wait.ranks:
        other = _own(world, looks) if rank == world.rank else _read(world, rank)
        if other is not None:
            says[rank] = f"waits in {other.waits[0].text}"
            continue
        post: Any = {"count": 0, "last": ""} if log is None else latest_post(world, log, rank)
        key = f"{world.prefix}/does/{rank}"
        line = world.store.get(key).decode() if world.store.check([key]) else "an unknown line, it does not answer"
        came = "has come" if wait.number and post["count"] >= wait.number else "did not come"
        last = f"; its last collective there was {post['last']}" if post["last"] else ""
        says[rank] = f"{came} and is at {line}{last}"
    _give_up(world, RankWaitError.__name__, f"a collective waits for {seconds:.0f} s", says)


def _give_up(world: World, kind: str, found: str, says: Mapping[int, str]) -> None:
    lines = lines_by_rank(says)
    asked = "wait for the other ranks in a collective"
    world.give_up(Note(world.rank, asked, kind, found, kind, 1, is_final=True, ranks_say=lines))
