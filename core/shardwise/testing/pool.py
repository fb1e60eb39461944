"""A pool of worker processes that stay up, so that a multi-rank test takes milliseconds instead of a spawn."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
import torch.multiprocessing as mp
from attrs import evolve, frozen

from shardwise.errors import RankFailedError, WorkerError
from shardwise.testing import fork_server
from shardwise.testing.pickling import dumps_by_value, importable
from shardwise.testing.worker import Answer, RankFailure, Seat, serve

__all__ = ["RankFailure", "WorkerPool"]

START_TIMEOUT = 120.0
"""Seconds for all workers to import torch and to join the group; a slow disk needs most of it."""

GRACE = 5.0
"""Seconds that the other ranks have after one rank has failed; those still busy wait for it in a collective."""

PRELOADED = "shardwise.testing.preloaded"
"""The module that a fork server imports."""

STACK_TIMEOUT = 2.0
"""Seconds that a hung worker has to write its stack, which takes milliseconds where the process can run at all."""

NO_ANSWER = ("died", "hung")
OUT_OF_STEP = (*NO_ANSWER, RankFailedError.__name__)
BLAME = {"died": 0, RankFailedError.__name__: 2, "hung": 3}


@frozen
class Worker:
    """One worker process, as the parent sees it."""

    rank: int
    process: BaseProcess
    connection: Connection
    stack_path: Path


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start a process that no Ctrl-C reaches until it says so: it would end in the middle of an import, with a
    traceback.
    """
    # The first start of a process starts it, and it then lets these signals through, whatever was blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerPool:
    """Local processes in one process group that run functions together, one rank each.

    A context manager. The workers start with the first :meth:`run`, keep their state (meshes, caches) between runs,
    run torch on one thread, and die with the parent. After a failure that may have left ranks out of step the
    workers are ended, and the next run starts fresh ones.

    With ``start_method="forkserver"`` the workers of all such pools are copies of one process that has imported torch
    and the plugins already. They start faster, have the same hash seed, and see the environment variables of the first
    such pool.
    """

    def __init__(
        self, world_size: int = 4, backend: str = "gloo", start_method: Literal["spawn", "forkserver"] = "spawn"
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self.start_method = start_method
        self._workers: list[Worker] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "up" if self._workers else "down"
        return f"WorkerPool(world_size={self.world_size}, backend={self.backend!r}, {state})"

    @property
    def pids(self) -> list[int]:
        """The process ids by rank; empty while no workers are up."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = 60.0) -> list[Any]:
        """Call ``fn(*args)`` on every rank and give the results by rank.

        ``timeout`` is in seconds, None for no limit. Arguments and results are pickled; functions of modules that a
        fresh process cannot import (tests) are sent by value. Raises :class:`WorkerError` when a rank raises, dies or
        does not answer; its ``errors`` holds one :class:`RankFailure` or None per rank.
        """
        asked = f"run {getattr(fn, '__qualname__', repr(fn))} on {self.world_size} workers"
        payload = _dumps_call(fn, args)
        if not self._workers:
            self._start()
        try:
            for worker in self._workers:
                with suppress(OSError):  # a dead worker shows when its answer is awaited
                    worker.connection.send_bytes(payload)
            outcomes = self._collect(timeout)
        except BaseException:
            self.close()
            raise
        return self._results(asked, outcomes)

    def close(self) -> None:
        """End all workers at once; the next :meth:`run` starts fresh ones."""
        started = [worker for worker in self._workers if worker.process.pid is not None]
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.process.join()
        for worker in self._workers:
            worker.process.close()
            worker.connection.close()
        self._workers = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-pool-")
        # The parent hosts the store: the port is surely free, and the store outlives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = mp.get_context(self.start_method)
        if self.start_method == "forkserver":
            context.set_forkserver_preload([PRELOADED])
        # Longer than any run's own timeout is likely to be: the pool judges hangs, not the group.
        patience = timedelta(minutes=30)
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                stack_path = Path(self._folder.name) / f"stack-{rank}"
                port, parent = self._store.port, os.getpid()
                seat = Seat(rank, self.world_size, self.backend, port, parent, str(stack_path), patience)
                process = context.Process(target=serve, args=(seat, theirs), daemon=True, name=f"rank {rank}")
                self._workers.append(Worker(rank, process, ours, stack_path))
                if self.start_method == "forkserver":
                    with _without_interrupts():
                        fork_server.ensure_running()
                    process.start()  # waits until the server has imported torch
                else:
                    with _without_interrupts():
                        process.start()
                theirs.close()
            self._results(f"start {self.world_size} workers", self._collect(START_TIMEOUT))
        except BaseException:
            self.close()
            raise

    def _collect(self, timeout: float | None) -> list[Answer]:
        """One answer per rank; a worker that died or did not answer in time gets a failure made here."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        waiting = {worker.rank: worker for worker in self._workers}
        answers: dict[int, Answer] = {}
        while waiting:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready = wait([source for w in waiting.values() for source in (w.connection, w.process.sentinel)], left)
            if not ready:
                break
            for worker in [w for w in waiting.values() if w.connection in ready or w.process.sentinel in ready]:
                answer = answers[worker.rank] = _answer_of(worker)
                del waiting[worker.rank]
                if answer.failure is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for worker in waiting.values():
            os.kill(worker.process.pid or 0, signal.SIGUSR1)  # it writes the stack that it hangs in
        failed = any(answer.failure for answer in answers.values())
        message = f"no answer {GRACE:g} s after another rank failed" if failed else f"no answer within {timeout} s"
        for rank, worker in waiting.items():
            answers[rank] = Answer(failure=RankFailure(rank, "hung", message, _read_stack(worker.stack_path)))
        return [answers[rank] for rank in range(self.world_size)]

    def _results(self, asked: str, answers: list[Answer]) -> list[Any]:
        failures = [_failure_of(answer) for answer in answers]
        if not any(failures):
            return [pickle.loads(answer.value) for answer in answers]
        in_step = all(f is not None and f.kind not in OUT_OF_STEP and not f.is_closed for f in failures)
        if not in_step:
            self.close()
        # One error for all ranks, led by one that died or raised: that explains the ranks that waited for it.
        real = sorted(filter(None, failures), key=lambda failure: (BLAME.get(failure.kind, 1), failure.rank))
        first = real[0]
        how = first.kind if first.kind in NO_ANSWER else f"raised {first.kind}"
        others = f" (ranks {[failure.rank for failure in real[1:]]} failed too)" if len(real) > 1 else ""
        ranks_by_text: dict[str, list[int]] = {}
        for failure in real:
            ranks_by_text.setdefault(failure.traceback or failure.message, []).append(failure.rank)
        tracebacks = "\n".join(
            f"--- rank {', '.join(map(str, ranks))}\n{text}" for text, ranks in ranks_by_text.items()
        )
        error = WorkerError(
            asked=asked,
            found=f"rank {first.rank} {how}: {first.message}{others}",
            do=f"Correct what the tracebacks show:\n{tracebacks}",
            errors=failures,
            rank=first.rank,
        )
        raise error from first.error


def _dumps_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    inner = fn
    while isinstance(inner, partial):  # it has no module of its own
        inner = inner.func
    package = sys.modules.get((getattr(inner, "__module__", None) or "__main__").partition(".")[0])
    if package is None or package.__name__ == "__main__" or importable(package.__name__):
        return dumps_by_value((fn, args))
    import cloudpickle

    cloudpickle.register_pickle_by_value(package)
    try:
        return dumps_by_value((fn, args))
    finally:
        cloudpickle.unregister_pickle_by_value(package)


def _answer_of(worker: Worker) -> Answer:
    try:
        if worker.connection.poll():
            answer: Answer = pickle.loads(worker.connection.recv_bytes())
            return answer
    except (EOFError, OSError):
        pass
    worker.process.join(timeout=GRACE)
    code = worker.process.exitcode
    if code is None:
        message = "its connection closed while the process still ran"
    elif code >= 0:
        message = f"its process ended with exit code {code}"
    else:
        message = f"its process was killed by {signal.Signals(-code).name}"
    return Answer(failure=RankFailure(worker.rank, "died", message, _last_stack(worker.stack_path, message)))


def _last_stack(path: Path, message: str) -> str:
    """The message and where Python was when native code crashed; empty where the process wrote nothing."""
    text = path.read_text().partition("\nExtension modules:")[0] if path.exists() else ""
    return f"{message}\n{text}" if text else ""


def _read_stack(path: Path) -> str:
    """What a worker writes when it is asked for its stack: there once it has stopped growing. Empty for a worker that
    hung before it opened the file.
    """
    if not path.exists():
        return ""
    end = time.monotonic() + STACK_TIMEOUT
    before, text = "", path.read_text()
    while time.monotonic() < end and not (text and text == before):
        time.sleep(0.05)
        before, text = text, path.read_text()
    return _main_thread_first(text)


def _main_thread_first(text: str) -> str:
    """The stacks of faulthandler, without the numbers of threads: ranks that hang in one place have equal texts."""
    threads = re.sub(r"(?m)^(Current thread|Thread) 0x\w+", r"\1", text).strip("\n").split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current")))


def _failure_of(answer: Answer) -> RankFailure | None:
    if answer.failure is None or not answer.error:
        return answer.failure
    try:
        return evolve(answer.failure, error=pickle.loads(answer.error))
    except Exception:  # noqa: BLE001 - an exception with its own constructor may not unpickle; its text remains
        return answer.failure
