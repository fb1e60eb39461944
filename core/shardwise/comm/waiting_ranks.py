"""The ranks that wait for one that has failed: a thread sees that they wait, reads the notes and ends the wait.

:mod:`shardwise.comm.rank_failures` has the whole story.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from types import FrameType
from typing import Any
from weakref import ref

import torch.distributed as dist
from attrs import evolve

from shardwise.comm.call_posts import compare_calls, has_issued
from shardwise.comm.call_sites import TORCH, short_line, users_frame
from shardwise.comm.ended_programs import tell_left_groups
from shardwise.comm.failure_notes import PROCESS, TICK, Note, Wait, World, current_world, ranks_of
from shardwise.comm.gone_processes import absent_rank, gone_rank, learn_processes
from shardwise.comm.standstill import look_at_waits
from shardwise.comm.stopped_compiles import stop_compiling
from shardwise.comm.thread_frames import caller_of, frames_of_threads, handled_in, local_of, stack_of
from shardwise.errors import ShardingError
from shardwise.private_torch.distributed import calls_of

__all__ = ["PATIENCE", "explained", "explained_among", "failure_behind", "look_for_failures"]

_MOMENT = 2.0  # seconds from the end of a process's connections to its own, or to what it says of it, on a busy machine
_LOST = "onnection", "peer", "remote"  # words by which backends say that a connection has ended
_NEAR = 3  # frames in which a call of torch.distributed has its process group

PATIENCE = 2.0
"""Seconds for which the note of a rank that may have caught its error must stand before others stop waiting."""

_HERE = os.path.dirname(__file__)  # noqa: PTH120  # code objects name their files by strings
_TORCHS = str(sys.modules["torch.distributed.distributed_c10d"].__file__)
_APART = 4  # looks for each one of a rank that waits for nobody
_FRAMES_OF_STORE = 16  # that a question to the store may have, with what is read of its process before
_FRAMES_OF_OP = 8  # that torch may have between the call of an op and its kernel
# Where a thread waits for other ranks: the files of the functions that call the backend.
_WAITING = frozenset(
    {
        os.path.join(_HERE, "async_result.py"),  # noqa: PTH118
        os.path.join(_HERE, "coalescing.py"),  # noqa: PTH118
        os.path.join(_HERE, "failure_notes.py"),  # noqa: PTH118
        _TORCHS,
    }
)


_OF_GRAPHS = os.path.join(_HERE, "graph_calls.py")  # noqa: PTH118


def failure_behind(error: BaseException, process_group: Any) -> ShardingError | None:
    """The failure of another rank that made a collective raise ``error``, if one has left a note."""
    if current_world() is None or process_group is None:
        return None
    return _failure_among(error, ranks_of(process_group))


def _failure_among(error: BaseException, ranks: Sequence[int]) -> ShardingError | None:
    """The failure of one of some ranks that is behind an error."""
    world = current_world()
    if world is None:
        return None
    if world.failure is None:
        note = _note_behind(world, ranks, str(error))
        if note is None:
            return None
        world.give_up(note)
    assert world.failure is not None
    return world.failure.error(str(error))


def _note_behind(world: World, ranks: Sequence[int], error: str) -> Note | None:
    """The note of the rank that failed first, if one has, or a note about one whose process is gone or never came.

    The connections of a process are closed a moment before it is gone.
    """
    is_lost = any(word in error for word in _LOST)
    end = time.monotonic() + (_MOMENT if is_lost else 0.0)
    while True:
        notes = world.read(list(ranks))
        gone = gone_rank(world, [rank for rank in ranks if rank not in notes])
        if gone is not None:  # what others say is about its connections
            return gone
        is_over = time.monotonic() >= end
        # A program that fails may destroy its process groups first, and say a moment later why it ends.
        if notes and (is_over or not all(note.is_end for note in notes.values())):
            # The first to have failed, if several say so; a program that has only ended explains least.
            return min(notes.values(), key=lambda note: (not note.is_final, note.is_end, not note.message))
        if is_over:
            return absent_rank(world, ranks) if is_lost else None
        time.sleep(_MOMENT / 40)


@contextmanager
def explained(process_group: Any) -> Iterator[None]:
    """Around calls of torch.distributed: what they raise because another rank has failed says so."""
    try:
        yield
    except RuntimeError as error:
        failure = failure_behind(error, process_group)
        if failure is None:
            raise
        raise failure from error


@contextmanager
def explained_among(ranks: Sequence[int]) -> Iterator[None]:
    """Around calls of the store, in which some ranks meet: see :func:`explained`."""
    try:
        yield
    except ShardingError:
        raise
    except RuntimeError as error:
        failure = _failure_among(error, ranks)
        if failure is None:
            raise
        raise failure from error


def look_for_failures() -> None:
    """Look four times a second until the process ends."""
    while True:
        PROCESS.wakes.wait(TICK)
        PROCESS.wakes.clear()
        if PROCESS.is_ending.is_set():
            return
        world = current_world()
        if world is None:
            with suppress(Exception):
                tell_left_groups()
        for look in (_look, look_at_waits, compare_calls):
            # Nothing is compared after the first rank has failed: the store may end with its process at any time.
            if world is not None and world.failure is None and (look is _look or 0 not in world.final):
                with suppress(Exception):  # a watcher that ends would leave the next wait alone
                    look(world, time.monotonic())
        if world is not None and world.compiles:
            time.sleep(_APART * TICK)
            stop_compiling(world)


def _awaited(world: World, now: float) -> set[int]:
    """The ranks that threads have waited for since the last look; ``world.waits`` says more.

    A function of its own, since its frames keep alive what other threads drop meanwhile: the store takes its time.
    """
    waits: dict[Any, tuple[Any, float, Wait | None]] = {}
    ranks: set[int] = set()
    for thread, innermost in frames_of_threads().items():
        frame = _waiting_frame(innermost)
        if frame is not None:
            place, awaited = _waited_for(frame)
            known = world.waits.get(thread)
            if known is None or known[0] != place or now - known[1] < TICK:
                waits[thread] = place, now if known is None or known[0] != place else known[1], None
                continue
            waits[thread] = known if known[2] is not None else (place, known[1], _wait(world, thread, frame, awaited))
            ranks.update(range(world.size) if awaited is None else awaited)
    for log in world.logs.values():
        if log.holds_work and log.work is not None and not log.work.is_completed():
            # A device waits; the host may be elsewhere, so this ends no wait by a note.
            number = log.count
            place = log.name, number
            known = world.waits.get(log.name)
            wait = Wait("collective", log.name, number, log.ranks, str(log.call(number)))
            waits[log.name] = known if known is not None and known[0] == place else (place, now, wait)
    world.waits = waits
    return ranks


def _waiting_frame(frame: FrameType) -> FrameType | None:
    """The frame in which a thread waits for other ranks, by its innermost one; None if it does not wait."""
    if frame.f_code.co_filename in _WAITING:
        return frame
    for at in _outwards(frame, _FRAMES_OF_STORE):
        if at.f_code is World.wait_for.__code__:  # it asks the store for a key again and again, and is below then
            return at
    if frame.f_code.co_filename.startswith((TORCH, _OF_GRAPHS)):
        for at in _outwards(frame, _FRAMES_OF_OP):
            if at.f_code.co_filename == _OF_GRAPHS:
                return at if at.f_code.co_name == "wait" else None
    return None


def _outwards(frame: FrameType, number: int) -> Iterator[FrameType]:
    """A frame of another thread and its callers, so many."""
    at: FrameType | None = frame
    for _ in range(number):
        if at is None:
            return
        yield at
        at = caller_of(at)


def _have_come(world: World, rank: int) -> bool:
    """Whether a rank has issued all collectives that threads of this rank wait for: those wait for another one."""
    waits = [wait for _, _, wait in world.waits.values() if wait is not None and rank in wait.ranks]
    return bool(waits) and all(has_issued(world, wait, rank) for wait in waits)


def _wait(world: World, thread: int, frame: FrameType, awaited: Sequence[int] | None) -> Wait | None:
    """What a thread waits for in a frame, in words. A thread in ``finally`` or ``except`` says what it handles."""
    wait = _wait_in(world, thread, frame, awaited)
    error = _handled(thread)
    return wait if wait is None or not error else evolve(wait, text=f"{wait.text}, after {error}")


def _handled(thread: int) -> str:
    """The error that a thread handles; empty if there is none."""
    error = handled_in(thread)
    return "" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}".rstrip(": ")


def _wait_in(world: World, thread: int, frame: FrameType, awaited: Sequence[int] | None) -> Wait | None:
    if thread in world.compares:
        return world.compares[thread]
    stack = stack_of(frame)
    user = users_frame(frame)
    line = "" if user is None else f" at {short_line(user.f_code, user.f_lasti)}"
    for at in takewhile(lambda at: at.f_code.co_filename.startswith(_HERE), stack):
        result = local_of(at, "self")
        log = getattr(result, "log", None)
        if log is not None:
            number = getattr(result.work, "number", result.number)
            text = str(log.call(number))  # where it was issued; the line where it is waited for may be another one
            return Wait("collective", log.name, number, log.ranks, text if line in text else f"{text}, waits{line}")
    if frame.f_code.co_filename != _TORCHS:
        return None
    ranks = tuple(range(world.size) if awaited is None else awaited)
    group = _group_of(frame)
    text = f"torch.distributed.{frame.f_code.co_name}{line}"
    return Wait("torch", str(group.group_name), calls_of(group), ranks, text)


def _group_of(frame: FrameType) -> Any:
    """The process group of the call of torch.distributed that a thread waits in."""
    groups = (local_of(at, "group") for at in _near(frame))
    return next((group for group in groups if group is not None), dist.group.WORLD)


def _near(frame: FrameType) -> Iterator[FrameType]:
    """The frames of torch and of this package in which the call that a thread waits in has its arguments."""
    at: FrameType | None = frame
    for _ in range(_NEAR):
        if at is None or not at.f_code.co_filename.startswith((TORCH, _HERE)):
            return  # what a program names alike is its own
        yield at
        at = caller_of(at)


def _look(world: World, now: float) -> None:
    """Give up where a thread waits for a rank that has failed, or compiles what would."""
    world.looks += 1
    if (
        world.looks & (world.looks - 1) == 0 and not world.final
    ):  # in time: the store may end with the process of a rank
        learn_processes(world)
    ranks = _awaited(world, now)
    if not ranks and world.looks % _APART == 0 and world.learn_final():
        stop_compiling(world)
    if ranks and world.own is None and world.question is not None:
        world.write(world.question)
    notes = world.read(sorted(ranks)) if ranks else {}
    standing = {}
    for rank, note in notes.items():
        before = world.notes.get(rank)
        standing[rank] = before if before is not None and before[0] == note else (note, now)
    world.notes = standing
    for note, since in standing.values():
        is_shared = world.raised[note.key] >= note.times
        if note.is_end and _have_come(world, note.rank):
            continue
        if note.is_final or (not is_shared and now - since >= PATIENCE):
            world.give_up(note)
            return


def _waited_for(frame: FrameType) -> tuple[Any, Sequence[int] | None]:
    """What a thread waits for, to be compared with what it waits for later, and the ranks; ``None`` for any rank."""
    place: Any = (id(frame), frame.f_lasti)
    for at in _near(frame):
        waiter = local_of(at, "self")
        if hasattr(waiter, "process_group"):  # an AsyncResult; the frames of two of them may have one address
            return ref(waiter), None if waiter.process_group is None else ranks_of(waiter.process_group)
        awaited = local_of(at, "awaited")
        if awaited is not None:  # it looks again and again, so its instruction changes
            return (id(at), local_of(at, "key")), awaited
        group = local_of(at, "group")
        if group is not None:
            # The frames of two calls may have one address.
            return (*place, calls_of(group)), ranks_of(group)
    return (*place, calls_of(dist.group.WORLD)), None
