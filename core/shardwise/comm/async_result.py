"""Collectives that are under way.

Issuing a collective returns an :class:`AsyncResult`. :meth:`AsyncResult.wait` returns the tensor. It also does the
local work that follows the collective, such as an average or a change of strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import ref

from torch import Tensor
from torch.futures import Future

from shardwise.comm.collective_log import CollectiveLog
from shardwise.comm.waiting_ranks import failure_behind
from shardwise.private_torch.dispatch import memory_of

__all__ = ["AsyncResult", "InFlightLimit", "SendReceive"]


class AsyncResult:
    """A collective under way, and the local steps that follow it. To wait again returns the same tensor.

    ``work`` is that of ``process_group``, ``None`` for a result that is there. The collective fills ``out`` and reads
    ``sent``; both stay alive until the wait. A result that is deleted waits first, so that no collective is left under
    way. It never issues a collective: ranks delete objects in different orders. ``log`` has recorded the collective;
    ``number`` is its number there.
    """

    __slots__ = ("__weakref__", "_lock", "_out", "_sender", "_sent", "_steps", "log", "number", "process_group", "work")

    final = True  # see shardwise.tensor.waiting.Source

    def __init__(
        self,
        work: Any,
        out: Tensor,
        sent: Tensor | None = None,
        process_group: Any = None,
        log: CollectiveLog | None = None,
    ) -> None:
        self.work = work
        self.log = log
        if log is not None:
            self.number = log.count
            if log.holds_work:
                log.work = work
        self.process_group = process_group
        self._out = out
        self._sent = sent
        self._sender: Any = None
        self._steps: tuple[Callable[[Tensor], Tensor], ...] = ()
        self._lock = Lock()

    @property
    def held(self) -> int:
        """The bytes that stay alive until the wait: those of the result and of the tensor that is sent."""
        if self.work is None or self._sent is None or _same_memory(self._sent, self._out):
            return 0
        return self._out.nbytes + self._sent.nbytes

    def keep(self, tensor: Any, local: Tensor) -> AsyncResult:
        """Keep ``tensor`` alive while its ``local`` memory is sent: autograd reuses gradients without references."""
        if self.work is not None and self._sent is not None and _same_memory(self._sent, local):
            self._sender = tensor
        return self

    def then(self, step: Callable[[Tensor], Tensor]) -> AsyncResult:
        """Add a step that the wait applies to the result; local work only. Returns this object."""
        if self.work is None:
            self._out = step(self._out)
        else:
            self._steps += (step,)
        return self

    def wait(self) -> Tensor:
        """The result. Raises :class:`RankFailedError` if another rank failed, else what the process group raises."""
        if self.work is None:
            return self._out
        with self._lock:  # another thread, such as autograd's, may wait for the same tensor
            if self.work is not None:
                try:
                    self.work.wait()
                except RuntimeError as error:
                    failure = failure_behind(error, self.process_group)
                    if failure is None:
                        raise
                    raise failure from error
                while self._steps:  # after a failure the next wait goes on with the step that failed
                    self._out = self._steps[0](self._out)
                    self._steps = self._steps[1:]
                self.work, self._sent, self._sender = None, None, None
        return self._out

    def __del__(self) -> None:
        if self.work is not None:
            with suppress(Exception):  # no caller is left to raise to, and the process group may be gone
                self.work.wait()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return memory_of(a) == memory_of(b)


class SendReceive:
    """The works of a send and of a receive, as one. Backends have no future for these, so the wait finishes it."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._finished: Future[None] | None = None

    def get_future(self) -> Future[None]:
        self._finished = self._finished or Future()
        return self._finished

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finished is not None:
            self._finished.set_result(None)


class InFlightLimit:
    """The collectives of a backward pass: those under way hold at most ``limit`` bytes, but one is always allowed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._results: deque[tuple[ref[AsyncResult], int]] = deque()

    def add(self, result: AsyncResult) -> None:
        """Add a collective, and wait for the oldest ones while all together hold too much."""
        self._results.append((ref(result), result.held))
        self._held += result.held
        while len(self._results) > 1:
            oldest, held = self._results[0][0](), self._results[0][1]
            if self._held <= self._limit and oldest is not None and oldest.work is not None:
                break
            self._results.popleft()
            self._held -= held
            if oldest is not None:
                oldest.wait()
