"""The comparison of each collective over the ranks of its group before it is issued, where a program asks for that.

The ranks meet in the store: nothing is sent over the process group whose order is in doubt. A rank that waits for one
that has gone elsewhere is found as any other that waits (:mod:`shardwise.comm.standstill`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType

from shardwise.comm.call_posts import lines_by_rank
from shardwise.comm.call_sites import operation, short_line, users_frame, users_frames
from shardwise.comm.collective_log import CollectiveLog, compare_with, comparing, in_words
from shardwise.comm.failure_notes import LEFT, Note, Wait, World, current_world, same_calls
from shardwise.comm.origins import origins_of, track_origins
from shardwise.comm.rank_failures import go_on
from shardwise.comm.waiting_ranks import explained_among
from shardwise.errors import RankDisagreementError
from shardwise.kernel.plurals import counted
from shardwise.settings import read_settings

__all__ = ["check_ranks", "compare_if_asked"]


@contextmanager
def check_ranks() -> Iterator[None]:
    """Compare each collective over the ranks of its group before it is issued, while the context lasts.

    The ranks compare its number, kind, mesh dims and bytes, the op and its plan, the user's line, and where the tensor
    comes from. They raise :class:`RankDisagreementError` on every rank where these differ, with the lines of all. A
    collective then takes about a millisecond longer, and an op some ten microseconds. Every rank must enter and leave
    the context at the same point; it holds for all threads. Those of compiled graphs are compared as well. The setting
    ``check-ranks`` is the same for a whole program.
    """
    compare_with([*comparing, _compare])
    try:
        with track_origins():
            yield
    finally:
        compare_with(comparing[:-1])


@cache
def compare_if_asked() -> None:
    """Compare from now on if the setting ``check-ranks`` is on."""
    if read_settings().check_ranks:
        compare_with([_compare, *comparing])
        track_origins().__enter__()


def _compare(log: CollectiveLog, code: int, nbytes: int | None) -> None:
    world = current_world()
    if world is None or not log.ranks:
        return
    go_on()
    frame = sys._getframe(2)  # noqa: SLF001  # documented
    text = f"{in_words(code, nbytes)}, {_asked(frame)}"
    if log.steps:
        text += f", after {counted(log.steps, 'optimizer step')}"
    origins = origins_of(frame, users_frame(frame))
    # Not the lines of the origins: two lines may make the same tensor.
    digest = hashlib.sha256(f"{text} {[origin.digest for origin in origins]}".encode()).hexdigest()[:16]
    if origins:
        text += f", for {', '.join(map(str, origins))}"
    place = f"compare/{log.name}"
    world.asked[place] += 1
    number = world.asked[place]
    key = f"{world.prefix}/{place}/{number}"
    world.store.add(f"{key}/{digest}", 1)
    if world.store.add(f"{key}/all", 1) == len(log.ranks):
        is_same = world.store.add(f"{key}/{digest}", 0) == len(log.ranks)
        _forget(world, f"{world.prefix}/{place}/{number - 1}", world.compared.get(log.name, ""))
        world.store.set(f"{key}/verdict", str(is_same))
    world.compared[log.name] = digest
    world.compared_at[log.name] = log.count + 1
    wait = Wait("comparison", log.name, log.count + 1, log.ranks, text)
    with explained_among(log.ranks), world.compares_as(wait):
        world.wait_for(f"{key}/verdict", log.ranks)
        if world.failure is None and world.store.get(f"{key}/verdict") != b"True":
            raise _disagreement(world, log, key, text)
    if world.failure is not None:
        raise _ended(world.failure, log, text) or world.failure.error("")


def _ended(failure: Note, log: CollectiveLog, text: str) -> RankDisagreementError | None:
    """The error where the rank that this one waited for has come to the end of its program."""
    if not failure.is_end:
        return None
    did = "destroyed its process groups" if failure.kind == LEFT else "ended its program"
    return RankDisagreementError(
        asked=f"issue collective {log.count + 1} of ranks {', '.join(map(str, log.ranks))}",
        found=f"rank {failure.rank} has {did}, and this rank is at {text}",
        do=same_calls(),
        differences=(),
    )


def _asked(frame: FrameType | None) -> str:
    """What the program called, by which plan, and where."""
    user, called = users_frames(frame)
    plan = None
    while frame is not None and frame is not user:
        if frame.f_code.co_filename.startswith("<shardwise handler"):
            plan = frame.f_locals.get("plan")
        frame = frame.f_back
    line = "an unknown line" if user is None else short_line(user.f_code, user.f_lasti)
    what = "" if called is None else operation(called.f_code)
    return f"{what} at {line}" + ("" if plan is None else f", {plan!r}")


def _forget(world: World, key: str, digest: str) -> None:
    """Drop the keys of a comparison that is over: every rank has come to the next one."""
    for name in ("all", "verdict", digest):
        with suppress(RuntimeError, NotImplementedError):
            world.store.delete_key(f"{key}/{name}")


def _disagreement(world: World, log: CollectiveLog, key: str, text: str) -> RankDisagreementError:
    """The error of all ranks, which have all come here."""
    world.store.set(f"{key}/text/{world.rank}", text)
    texts = {}
    for rank in log.ranks:
        world.wait_for(f"{key}/text/{rank}", log.ranks)
        if world.failure is None:
            texts[rank] = world.store.get(f"{key}/text/{rank}").decode()
    lines = lines_by_rank(texts)
    return RankDisagreementError(
        asked=f"issue collective {log.count + 1} of ranks {', '.join(map(str, log.ranks))}",
        found=f"the ranks are not at the same one: {'; '.join(lines)}",
        do=same_calls(),
        differences=tuple(lines),
        ranks_say=tuple(lines),
    )
