"""The failure of one rank: it tells the others, and those that wait for it in a collective stop waiting.

An error that data causes on one rank leaves the other ranks in a collective that this rank never joins; a backend ends
that after half an hour. So a rank whose op raises leaves a note in the store of the default process group. In each
process a thread looks four times a second whether some thread is held up in a collective. If so it reads the notes of
the ranks of that collective, and closes the connections of the process groups where one of them has failed. The
collective then raises, and :func:`failure_behind` says why. Ranks that are not held up read nothing, and a collective
does nothing that it would not do anyway: the thread sees from the stacks who waits.

A note is not a failure yet. All ranks may raise the same error and catch it; one rank may catch its error and go on. So
a rank withdraws its note before it issues another collective, a rank ignores a note about an error that it has raised
itself as often, and a note counts only when it has stood for ``PATIENCE`` seconds. The note of a rank that has left its
program, by an error that nobody caught, counts at once.

An error inside a lowering is different: the lowering may have been about to communicate, and another collective of this
rank would be taken for that one. So before such a rank goes on, it waits until every other rank of the mesh has raised
the same error; otherwise one of them waits, gives up, and this rank gives up as well.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from attrs import asdict, define, evolve, field, frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import RankDisagreementError, RankFailedError
from shardwise.kernel.world import world_number
from shardwise.private_torch.distributed import default_store, is_reachable
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.tracing import outside_modes
from shardwise.rule.lowering import LocalCall

__all__ = ["PATIENCE", "comparing", "explained", "failure_behind", "go_on", "start_anew", "tell", "trying", "watch"]

PATIENCE = 2.0
"""Seconds for which the note of a rank that may have caught its error must stand before others stop waiting."""

_TICK = 0.25  # seconds between two looks at the stacks
_SOON = 0.02  # seconds between two looks at what other ranks have raised
_LONGEST = 60.0  # seconds for which a rank looks; another rank may have ended without a word
_TOLD = "_shardwise_told"  # an attribute of errors
_LINGER = 3.0  # seconds for which the first rank, which may hold the store, lets the others read why it failed
_HERE = os.path.dirname(__file__)  # noqa: PTH120  # code objects name their files by strings
# Where a thread waits for other ranks: the files of the functions that call the backend.
_WAITING = frozenset(
    {
        os.path.join(_HERE, "async_result.py"),  # noqa: PTH118
        os.path.join(_HERE, "coalescing.py"),  # noqa: PTH118
        str(sys.modules["torch.distributed.distributed_c10d"].__file__),
    }
)


@frozen
class _Note:
    """What a rank has left in the store: the rank that failed (itself, or the one that it waited for) and its error.

    ``times`` counts the errors with this ``key`` on that rank. ``is_final`` says that the rank will not go on.
    """

    rank: int
    op: str
    kind: str
    message: str
    key: str
    times: int
    is_final: bool

    def error(self, cause: str) -> RankFailedError:
        where = f" in {self.op}" if self.op else ""
        message = f"{self.kind}: {self.message}" if self.message else self.kind
        return RankFailedError(
            asked="wait for the other ranks in a collective",
            found=f"rank {self.rank} has failed{where}: {message}",
            do=f"Correct what rank {self.rank} says. This run's process groups are closed: end the program, or destroy "
            "them and start torch.distributed again.",
            rank=self.rank,
            error=message,
            op=self.op,
            cause=cause,
        )


@define(eq=False)
class _World:
    """What one rank tells and knows of failures, for one default process group."""

    store: Any
    rank: int
    size: int
    prefix: str
    default_group: Any  # a weak reference
    process_groups: WeakSet[Any] = field(factory=WeakSet)
    groups: WeakSet[Any] = field(factory=WeakSet)  # of shardwise.comm.group.Group
    raised: Counter[str] = field(factory=Counter)
    own: _Note | None = None
    question: _Note | None = None  # left if this rank is held up in :func:`comparing`
    lowering_of: tuple[int, ...] = ()  # the ranks of the mesh in whose lowering the error of the note was raised
    failure: _Note | None = None
    # By thread, the frame that it waits in and since when; by rank, its note and since when it stands.
    waits: dict[int, tuple[Any, float]] = field(factory=dict)
    notes: dict[int, tuple[_Note, float]] = field(factory=dict)

    def write(self, note: _Note | None) -> None:
        self.own = note
        if note is None:
            self.lowering_of = ()
        with suppress(RuntimeError):  # the store is gone when its process has ended
            self.store.set(f"{self.prefix}/{self.rank}", "" if note is None else json.dumps(asdict(note)))
            if note is not None:
                self.store.add(f"{self.prefix}/notes", 1)

    def read(self, ranks: list[int]) -> dict[int, _Note]:
        """The notes of other ranks that stand."""
        notes = {}
        with suppress(RuntimeError):
            if self.store.add(f"{self.prefix}/notes", 0) == 0:
                return {}
            for rank in ranks:
                key = f"{self.prefix}/{rank}"
                text = self.store.get(key) if rank != self.rank and self.store.check([key]) else b""
                if text:
                    notes[rank] = _Note(**json.loads(text))
        return notes

    def count_key(self, rank: int) -> str:
        """The key under which a rank counts its errors inside the lowerings of one mesh."""
        return f"{self.prefix}/{rank}/{'-'.join(map(str, self.lowering_of))}"

    def give_up(self, note: _Note) -> None:
        """Tell the others that this rank stops because of a note, and close the connections of all process groups."""
        self.failure = note
        self.write(evolve(note, is_final=True))
        for process_group in list(self.process_groups):
            _close(process_group)


_worlds: list[_World] = []  # the current one, if there is one
_installed_in: list[int] = []  # the process; one that is forked from it has neither its thread nor its rank
_stopped = threading.Event()


def _world() -> _World | None:
    world = _worlds[0] if _worlds else None
    if world is None or world.default_group() is not dist.group.WORLD or os.getpid() != _installed_in[0]:
        return None
    return world


def watch(process_group: Any, group: Any = None) -> None:
    """Have the waits of a process group watched; the first call for a default process group starts the thread.

    ``group`` is the :class:`shardwise.comm.group.Group` that issues its collectives, if there is one already.
    """
    world = _joined_world()
    if world is not None:
        world.process_groups.add(process_group)
        if group is not None:
            world.groups.add(group)
            if world.own is not None:
                group.hold(go_on)


def _joined_world() -> _World | None:
    world = _world()
    if world is None and dist.is_initialized() and not is_rehearsing():
        if _installed_in and _installed_in[0] != os.getpid():
            return None
        default, store = dist.group.WORLD, default_store()
        if store is None:
            return None
        if not _installed_in:
            _install()
        prefix = f"shardwise/failed/{world_number()}"
        world = _World(store, dist.get_rank(), dist.get_world_size(), prefix, ref(default))
        _worlds[:] = [world]
    return world


def _install() -> None:
    _installed_in.append(os.getpid())
    threading.Thread(target=_watch, name="shardwise rank failures", daemon=True).start()
    before = sys.excepthook

    def tell_and_report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell(error, is_final=not hasattr(sys, "ps1"))  # a person at a prompt goes on
        before(kind, error, trace)

    sys.excepthook = tell_and_report
    atexit.register(_leave)
    Finalize(None, _leave, exitpriority=0)  # a process of multiprocessing ends without atexit


class _Here(threading.local):
    """Whether this thread only tries something."""

    is_trying = False


_here = _Here()


@contextmanager
def trying() -> Iterator[None]:
    """Within the block an error is an answer and not a failure: nobody is told of it."""
    before, _here.is_trying = _here.is_trying, True
    try:
        yield
    finally:
        _here.is_trying = before


# -- the rank that fails ---------------------------------------------------------------------------------------------


def tell(error: BaseException, op: str = "", *, is_final: bool = False) -> None:
    """Leave a note about an error of this rank. ``is_final`` says that the rank will not go on."""
    world = None if _here.is_trying or isinstance(error, (RankFailedError, SystemExit)) else _joined_world()
    if world is None:
        return
    if world.own is not None and _TOLD in vars(error):
        note = world.own  # the error left an inner op already
        if is_final and not note.is_final:
            world.write(evolve(note, is_final=True))
        return
    vars(error)[_TOLD] = op
    kind = type(error).__name__
    key = f"{op} {kind}"
    world.raised[key] += 1
    message = str(error).partition("\n")[0][:500]
    ranks = _ranks_of_lowering(error.__traceback__)
    if ranks:
        world.lowering_of = ranks
        with suppress(RuntimeError):
            world.store.add(world.count_key(world.rank), 1)
    world.write(_Note(world.rank, op, kind, message, key, world.raised[key], is_final))
    for group in list(world.groups):
        group.hold(go_on)


def _ranks_of_lowering(trace: TracebackType | None) -> tuple[int, ...]:
    """The ranks of the mesh whose lowering raised an error, if one did."""
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            mesh = getattr(value.comm, "mesh", None) if type(value) is LocalCall else None
            if isinstance(mesh, DeviceMesh):
                with outside_modes():  # the mesh makes its tensor of ranks anew, also while a graph is traced
                    return tuple(mesh.mesh.flatten().tolist())
        trace = trace.tb_next
    return ()


def go_on() -> None:
    """Withdraw this rank's note, because it goes on after an error.

    After an error inside a lowering, wait first for the other ranks; raises :class:`RankFailedError` where one of
    them has not raised that error and has stopped waiting for this rank.
    """
    world = _world()
    if world is None or world.own is None or world.failure is not None:
        return
    _release(world)
    try:
        _wait_for_the_same_error(world)
    except RankFailedError:
        raise
    except RuntimeError:  # the store is gone, as its process has ended: the next collective fails
        pass
    world.write(None)


def _wait_for_the_same_error(world: _World) -> None:
    """After an error inside a lowering: wait until all ranks of the mesh have raised as many."""
    others = [rank for rank in world.lowering_of if rank != world.rank]
    count = world.store.add(world.count_key(world.rank), 0)
    end = time.monotonic() + _LONGEST
    while others and time.monotonic() < end:
        failed = next((n for n in world.read(others).values() if n.is_final and n.rank == world.rank), None)
        if failed is not None:
            world.give_up(failed)
            raise failed.error("")
        others = [rank for rank in others if world.store.add(world.count_key(rank), 0) < count]
        if others:
            time.sleep(_SOON)


def start_anew() -> None:
    """Withdraw this rank's note without waiting: every rank has ended what it did."""
    world = _world()
    if world is not None and world.own is not None and world.failure is None:
        _release(world)
        world.write(None)


@contextmanager
def comparing(op: str, text: str, ranks: Sequence[int]) -> Iterator[None]:
    """Around an agreement that some ranks may not come to: who is held up in it leaves a note, so that those see it."""
    world = _joined_world()
    if world is None:
        yield
        return
    key = f"{op} on {tuple(ranks)}"
    world.raised[key] += 1
    message = f"it compares {text}, and another rank does not"
    world.question = _Note(
        world.rank, op, RankDisagreementError.__name__, message, key, world.raised[key], is_final=False
    )
    try:
        yield
    finally:
        if world.own is world.question:
            start_anew()
        world.question = None


def _release(world: _World) -> None:
    for group in list(world.groups):
        group.release()


def _leave() -> None:
    """The process ends. The first rank may hold the store, so it lets the others read why it failed."""
    if _stopped.is_set():
        return
    world = _world()
    error = sys.exc_info()[1]  # that a process of multiprocessing ends by; nothing else reports it
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__
    if error is not None:
        tell(error, is_final=True)
    _stopped.set()
    if world is None:
        return
    if world.own is None:
        # Not final: what this rank has sent may still be on its way.
        if is_reachable(world.store):
            world.write(_Note(world.rank, "", "its program has ended", "", "", 1, False))
        return
    with suppress(RuntimeError):
        left = world.store.add(f"{world.prefix}/left", 1)
        end = time.monotonic() + _LINGER
        while world.rank == 0 and left < world.size and time.monotonic() < end:
            time.sleep(_TICK)
            left = world.store.add(f"{world.prefix}/left", 0)


# -- the ranks that wait ---------------------------------------------------------------------------------------------


def failure_behind(error: BaseException, process_group: Any) -> RankFailedError | None:
    """The failure of another rank that made a collective raise ``error``, if one has left a note."""
    world = _world()
    if world is None or process_group is None:
        return None
    if world.failure is None:
        notes = world.read(_ranks_of(process_group))
        if not notes:
            return None
        # The first to have failed, if several say so; a program that has only ended explains least.
        world.give_up(min(notes.values(), key=lambda note: (not note.is_final, not note.message)))
    assert world.failure is not None
    return world.failure.error(str(error))


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


def _watch() -> None:
    while not _stopped.wait(_TICK):
        world = _world()
        if world is not None and world.failure is None:
            with suppress(Exception):  # a watcher that ends would leave the next wait alone
                _look(world, time.monotonic())


def _look(world: _World, now: float) -> None:
    """Give up where a thread waits for a rank that has failed."""
    waits = {}
    ranks: set[int] = set()
    for thread, frame in sys._current_frames().items():  # noqa: SLF001  # documented; the threads pay nothing for it
        if frame.f_code.co_filename in _WAITING:
            place, process_group = _waited_for(frame)
            known = world.waits.get(thread)
            waits[thread] = known if known is not None and known[0] == place else (place, now)
            if now - waits[thread][1] >= _TICK:
                ranks.update(range(world.size) if process_group is None else _ranks_of(process_group))
    world.waits = waits
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
        if note.is_final or (not is_shared and now - since >= PATIENCE):
            world.give_up(note)
            return


def _waited_for(frame: FrameType) -> tuple[Any, Any]:
    """What a thread waits for, to be compared with what it waits for later, and the process group."""
    place: Any = (id(frame), frame.f_lasti)
    at: FrameType | None = frame
    for _ in range(3):
        if at is None:
            break
        waiter: Any = at.f_locals.get("self")
        if hasattr(waiter, "process_group"):  # an AsyncResult; the frames of two of them may have one address
            return ref(waiter), waiter.process_group
        if at.f_locals.get("group") is not None:
            return place, at.f_locals["group"]
        at = at.f_back
    return place, None


def _ranks_of(process_group: Any) -> list[int]:
    return list(dist.get_process_group_ranks(process_group))


def _close(process_group: Any) -> None:
    """End what waits for a process group, here and on its other ranks. It cannot be used afterwards."""
    backends = str(dist.get_backend_config(process_group))
    with suppress(Exception):
        if "gloo" in backends:
            # A receive that is not answered in time closes all connections of the group.
            other = int(dist.get_rank(process_group) == 0)
            process_group.recv([torch.empty(1)], other, 0x5EED).wait(timedelta(milliseconds=1))
    with suppress(Exception):
        if "nccl" in backends:
            process_group.abort()
