"""The worker's side of the pool: join the process group, then run what arrives until the parent is gone."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from shardwise.comm.ended_programs import end_program
from shardwise.comm.rank_failures import explain, groups_are_closed, start_anew, tell
from shardwise.private_torch.crashes import show_native_stacks
from shardwise.private_torch.distributed import share_gloo_device
from shardwise.testing.parent_death import kill_with_parent
from shardwise.testing.pickling import dumps_by_value
from shardwise.tools.program_errors import program_traceback

__all__ = ["Answer", "RankFailure", "Seat", "serve"]

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@frozen
class RankFailure:
    """What went wrong on one rank.

    ``kind`` is the exception's type name, or ``died`` or ``hung``; ``error`` is the exception itself where it can be
    pickled, else None; ``traceback`` is text, empty where none is known. ``is_closed`` says that the process groups of
    the rank are closed.
    """

    rank: int
    kind: str
    message: str
    traceback: str = ""
    error: BaseException | None = None
    is_closed: bool = False


@frozen
class Answer:
    """One rank's answer to one run: the pickled value, or the failure with its pickled exception."""

    value: bytes = b""
    failure: RankFailure | None = None
    error: bytes = b""


@frozen
class Seat:
    """Where a worker sits: its rank, the process group that it joins, and where it writes its stack when asked."""

    rank: int
    world_size: int
    backend: str
    port: int
    parent: int
    stack_path: str
    timeout: timedelta


def serve(seat: Seat, connection: Connection) -> None:
    """The worker's main function: answer every payload of the connection until it closes."""
    _die_with_parent(seat.parent)
    if connection.poll():  # the pool, which says nothing before the first answer, was interrupted and is closed
        os._exit(0)
    # Ctrl-C reaches the whole foreground group; the parent decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the pool blocks it until here
    with open(seat.stack_path, "w") as stacks:  # noqa: PTH123 - faulthandler wants the plain file object
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks, all_threads=True)  # for a crash of native code
        show_native_stacks()
        connection.send_bytes(pickle.dumps(_attempt(seat.rank, lambda: _join_group(seat))))
        gc.freeze()  # torch and the plugins stay: a collection that looks at them takes half a second
        while (payload := _receive(connection)) is not None:
            connection.send_bytes(pickle.dumps(_attempt(seat.rank, _call(payload))))
    # A normal exit would wait for peers that may be gone already.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent(parent: int) -> None:
    if os.getppid() != parent:  # a fork server started us, and lives as long as we do
        threading.Thread(target=_exit_after, args=(multiprocessing.parent_process(),), daemon=True).start()
        return
    # Elsewhere than on Linux the closed connection ends an idle worker.
    kill_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _exit_after(parent: Any) -> None:
    if parent is not None:
        parent.join()
    os._exit(1)


def _join_group(seat: Seat) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        # A thread of gloo that wakes may preempt the one that woke it, and then spins for a lock that that one holds.
        # Batch threads preempt no other: a collective of small tensors takes a quarter of the processor time.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if sys.platform in LOOPBACK:
        # All workers are local; the host's name may resolve to an address that nobody can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    if "gloo" in seat.backend:
        share_gloo_device(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if "nccl" in seat.backend:
        torch.cuda.set_device(seat.rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", seat.port, is_master=False, timeout=seat.timeout)
    dist.init_process_group(seat.backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=seat.timeout)


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes() or None
    except EOFError:
        return None


def _call(payload: bytes) -> Callable[[], Any]:
    def call() -> Any:
        fn, args = pickle.loads(payload)
        return fn(*args)

    return call


def _attempt(rank: int, call: Callable[[], Any]) -> Answer:
    start_anew()  # what an earlier run raised is over on every rank
    try:
        answer = Answer(value=dumps_by_value(call()))
    except BaseException as error:  # noqa: BLE001 - whatever a test raises goes back to the parent
        explain(error)
        tell(error, is_final=True)
        calls = program_traceback(error) or error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, calls))
        pickled = b""
        with suppress(Exception):  # an exception that cannot be pickled is sent as its text
            pickled = dumps_by_value(error)
        failure = RankFailure(rank, type(error).__name__, str(error), text, is_closed=groups_are_closed())
        return Answer(failure=failure, error=pickled)
    end_program()
    return answer
