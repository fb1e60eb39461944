"""The failure of one rank: it tells the others, and those that wait for it in a collective stop waiting.

An error that data causes on one rank leaves the other ranks in a collective that this rank never joins; a backend ends
that after half an hour. So a rank whose op raises leaves a note in the store of the default process group. In each
process a thread looks four times a second whether some thread is held up in a collective. If so it reads the notes of
the ranks of that collective, and closes the connections of the process groups where one of them has failed. The
collective then raises, and :mod:`shardwise.comm.waiting_ranks` says why. A rank that is not held up asks once a second
whether a rank has left its program by an error, and stops what it compiles if one has
(:mod:`shardwise.comm.stopped_compiles`). A collective does nothing that it would not do anyway: the thread sees from
the stacks who waits.

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
import gc
import hashlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch.distributed as dist
from attrs import evolve
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.call_sites import short_line, users_frame
from shardwise.comm.ended_programs import end_program, left_world, tell_left_groups
from shardwise.comm.failure_notes import GONE, PROCESS, Note, Wait, World, current_world, ranks_on
from shardwise.comm.forked_processes import refuse_collectives, refuse_group_of_parent
from shardwise.comm.gone_processes import tell_process
from shardwise.comm.native_end import end_with_reason
from shardwise.comm.shared_store import SharedStore
from shardwise.comm.waiting_ranks import explained_among, failure_behind, look_for_failures
from shardwise.errors import RankDisagreementError, RankFailedError, RankWaitError, ShardingError
from shardwise.kernel.world import world_number
from shardwise.private_torch.distributed import default_store
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.gloo_threads import await_rest
from shardwise.private_torch.native_ends import at_native_end, leave_native_ends
from shardwise.rule.lowering import LocalCall

__all__ = [
    "all_say",
    "at_step",
    "explain",
    "go_on",
    "groups_are_closed",
    "joined_world",
    "start_anew",
    "tell",
    "telling",
    "trying",
    "watch",
]

P = ParamSpec("P")
R = TypeVar("R")

_SOON = 0.02  # seconds between two looks at what other ranks have raised
_LONGEST = 60.0  # seconds for which a rank looks; another rank may have ended without a word
_TOLD = "_shardwise_told"  # an attribute of errors
_TOLD_ALREADY = RankFailedError, RankWaitError  # by the rank that found it


def watch(process_group: Any, group: Any = None) -> None:
    """Have the waits of a process group watched; the first call for a default process group starts the thread.

    ``group`` is the :class:`shardwise.comm.group.Group` that issues its collectives, if there is one already.
    """
    world = joined_world()
    if world is not None:
        world.process_groups.add(process_group)
        if group is not None:
            group.log = world.log_of(process_group)
            world.groups.add(group)
            if world.own is not None:
                group.hold(go_on)
    elif group is not None:
        refuse_group_of_parent(group)


def joined_world() -> World | None:
    """What this rank tells and knows of failures in the default process group; the first call begins that."""
    world = current_world()
    if world is None and dist.is_initialized() and not is_rehearsing():
        if PROCESS.watched not in (None, os.getpid()):
            return None
        default, store = dist.group.WORLD, default_store()
        if store is None:
            return None
        if PROCESS.watched is None:
            _install()
        size, prefix = dist.get_world_size(), f"shardwise/failed/{world_number()}"
        world = World(SharedStore(store, size), dist.get_rank(), size, prefix, ref(default))
        tell_process(world)
        PROCESS.world = world
    return world


def _install() -> None:
    PROCESS.watched = os.getpid()
    watcher = threading.Thread(target=look_for_failures, name="shardwise rank failures", daemon=True)
    watcher.start()
    before = sys.excepthook

    def tell_and_report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        tell(error, is_final=not hasattr(sys, "ps1"))  # a person at a prompt goes on
        before(kind, error, trace)

    sys.excepthook = tell_and_report
    of_threads = threading.excepthook

    def remember_and_report(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None:
            explain(error)
            if not isinstance(error, (*_TOLD_ALREADY, SystemExit)):
                PROCESS.ended_thread = f"one of its threads had ended by {type(error).__name__}, {_first_line(error)}"
        of_threads(args)

    threading.excepthook = remember_and_report
    at_native_end(end_with_reason)
    os.register_at_fork(after_in_child=refuse_collectives)
    atexit.register(_leave, watcher)
    Finalize(None, _leave, (watcher,), exitpriority=0)  # a process of multiprocessing ends without atexit


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


def explain(error: BaseException) -> None:
    """Add to an error of a call of torch.distributed why it was raised, if another rank has left a note.

    An error that an op of ours has told, or that another rank raised as well, is its own reason.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, ShardingError) or _TOLD in vars(error):
        return
    if dist.is_initialized():
        with suppress(Exception):
            failure = failure_behind(error, dist.group.WORLD)
            if failure is not None and getattr(failure, "error", "") != f"{type(error).__name__}: {_first_line(error)}":
                error.add_note(f"{type(failure).__name__}: {failure}")


# -- the rank that fails ---------------------------------------------------------------------------------------------


def tell(error: BaseException, op: str = "", *, is_final: bool = False) -> None:
    """Leave a note about an error of this rank. ``is_final`` says that the rank will not go on."""
    if _here.is_trying or isinstance(error, (*_TOLD_ALREADY, SystemExit)):
        return
    world = joined_world() or (left_world() if is_final else None)
    if world is None or world.failure is not None:
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
    message = _first_line(error)
    ranks = _ranks_of_lowering(error.__traceback__)
    if ranks:
        world.lowering_of = ranks
        with suppress(RuntimeError):
            world.store.add(world.count_key(world.rank), 1)
    ranks_say: tuple[str, ...] = ()
    if isinstance(error, RankDisagreementError) and "ranks_say" in error.fields:  # the others raise it as it is
        op, message, ranks_say = error.asked, error.found.partition(": ")[0], error.ranks_say
    world.write(Note(world.rank, op, kind, message, key, world.raised[key], is_final, ranks_say))
    for group in list(world.groups):
        group.hold(go_on)


def telling(function: Callable[P, R]) -> Callable[P, R]:
    """The function, of whose errors the other ranks are told: every rank must call it, and some wait in it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            tell(error, function.__name__)
            raise

    return call


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:500]


def _ranks_of_lowering(trace: TracebackType | None) -> tuple[int, ...]:
    """The ranks of the mesh whose lowering raised an error, if one did."""
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            mesh = getattr(value.comm, "mesh", None) if type(value) is LocalCall else None
            if isinstance(mesh, DeviceMesh):
                return ranks_on(mesh)
        trace = trace.tb_next
    return ()


def go_on() -> None:
    """Withdraw this rank's note, because it goes on after an error.

    After an error inside a lowering, wait first for the other ranks; raises :class:`RankFailedError` where one of
    them has not raised that error and has stopped waiting for this rank.
    """
    world = current_world()
    if world is None or world.own is None or world.failure is not None:
        return
    _release(world)
    try:
        _wait_for_the_same_error(world)
    except ShardingError:
        raise
    except RuntimeError:  # the store is gone, as its process has ended: the next collective fails
        pass
    world.write(None)


def _wait_for_the_same_error(world: World) -> None:
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
    world = current_world()
    if world is not None:
        world.forget_calls()
    _withdraw(world)


def groups_are_closed() -> bool:
    """Whether this rank has closed its process groups, because ranks have parted or one of them failed."""
    world = current_world()
    return world is not None and world.failure is not None


def at_step(mesh: DeviceMesh) -> None:
    """An optimizer step begins: raise where this rank's thread has found that ranks have parted, or that one failed.

    All ranks of the parameters' mesh make it, so it counts in what they compare of their next collective.

    The first steps, and then fewer and fewer, have the thread compare at once what the ranks have issued.
    """
    world = PROCESS.world
    if world is None or world is not current_world():
        return
    if world.failure is not None:
        raise world.failure.error("")
    world.steps += 1
    ranks = world.ranks_on(mesh)
    for log in tuple(world.logs.values()):
        if ranks.issuperset(log.ranks):
            log.tell_step()
    if world.steps & (world.steps - 1) == 0:
        PROCESS.wakes.set()


def _withdraw(world: World | None) -> None:
    if world is not None and world.own is not None and world.failure is None:
        _release(world)
        world.write(None)


def all_say(op: str, text: str, ranks: Sequence[int]) -> bool | None:
    """Whether some ranks, which all call this, say the same text; ``None`` where nobody can be asked.

    The ranks meet in the store, so one that waits in a collective instead gets no bytes that it does not expect. Then
    both raise: this rank :class:`RankDisagreementError`, and the other :class:`RankFailedError`.
    """
    world = joined_world()
    if world is None:
        return None
    go_on()
    place = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    world.asked[place] += 1
    message = f"it compares {text}, and another rank does not"
    about = f"{op} on {place}"
    world.raised[about] += 1
    question = Note(world.rank, op, RankDisagreementError.__name__, message, about, world.raised[about], is_final=False)
    world.question = question
    user = users_frame(inspect.currentframe())
    line = "" if user is None else f" at {short_line(user.f_code, user.f_lasti)}"
    wait = Wait("comparison", f"{op}/{place}", world.asked[place], tuple(ranks), f"{op}{line}")
    try:
        with explained_among(ranks), world.compares_as(wait):
            is_same = _is_same(world, f"{world.prefix}/{op}/{place}/{world.asked[place]}", text, ranks)
    finally:
        if world.own is question:
            _withdraw(world)
        world.question = None
    failure = world.failure
    if failure is not None and evolve(failure, is_final=False) == question:
        raise RankDisagreementError(
            asked=op,
            found=f"this rank has {text}, and another rank waits elsewhere",
            do="Run the same program on every rank, with parts that make the same global tensor.",
            differences=(),
        )
    if failure is not None:
        raise failure.error("")
    return is_same


def _is_same(world: World, key: str, text: str, ranks: Sequence[int]) -> bool:
    """Whether some ranks write the same text under a key of the store; False as well where a failure ends the wait."""
    same = f"{key}/{hashlib.sha256(text.encode()).hexdigest()}"
    world.store.add(same, 1)
    if world.store.add(f"{key}/all", 1) == len(ranks):
        world.store.set(f"{key}/verdict", str(world.store.add(same, 0) == len(ranks)))
    world.wait_for(f"{key}/verdict", ranks)
    return world.failure is None and bool(world.store.get(f"{key}/verdict") == b"True")


def _release(world: World) -> None:
    for group in list(world.groups):
        group.release()


_ENDING_SECONDS = 2.0  # a question to the store takes a thousandth; one to a store that is gone may not come back


def _leave(watcher: threading.Thread) -> None:
    """The process ends, and what looks for failures with it: a thread that comes back from the store when Python has
    ended would abort the process ("terminate called without an active exception"). So would a thread of gloo that has
    yet to let go of its last collective.
    """
    if PROCESS.is_ending.is_set():
        return
    try:
        _leave_world()
    finally:
        if watcher is not threading.current_thread():
            watcher.join(_ENDING_SECONDS)
        await_rest(_ENDING_SECONDS)


def _leave_world() -> None:
    """The first rank may hold the store, so it lets the others read why it failed."""
    world = current_world()
    error = sys.exc_info()[1]  # that a process of multiprocessing ends by; nothing else reports it
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__
    if error is not None:
        tell(error, is_final=True)
    PROCESS.is_ending.set()
    PROCESS.wakes.set()
    leave_native_ends()
    if world is None:
        world = tell_left_groups(is_end=True)
        if world is None:
            return
    if world.own is None or not world.own.is_final:
        end_program()
        return
    has_left = world.own.kind == GONE or world.own.is_end  # or does not say so
    world.let_others_read(world.size - has_left)
    # Python would look at all objects several times before it ends: for seconds, where other ranks compile meanwhile.
    # Garbage is still collected once, since it may be a file to which something is left to write.
    gc.collect()
    gc.freeze()
