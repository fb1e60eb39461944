"""Collectives that are under way.

Issuing a collective gives an :class:`AsyncResult`. :meth:`AsyncResult.wait` gives the tensor; it also does the local
work that follows, such as an average or a change of strides.
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

from shardwise.private_torch.dispatch import memory_of

__all__ = ["AsyncResult", "InFlightLimit", "SendReceive"]


class AsyncResult:
    """A collective under way and what is to be done with its result; waiting again gives the same tensor.

    ``work`` is the process group's, ``None`` for a result that is there already. ``out`` is the memory that it fills
    and ``sent`` what it reads: both stay alive until the wait. A result that is dropped waits on its way out, so that
    no collective is left behind; it issues none, because when an object is dropped is no order that ranks share.
    """

    __slots__ = ("__weakref__", "_kept", "_lock", "_out", "_sent", "_steps", "work")

    final = True  # see shardwise.tensor.waiting.Source

    def __init__(self, work: Any, out: Tensor, sent: Tensor | None = None) -> None:
        self.work = work
        self._out = out
        self._sent = sent
        self._kept: Any = None
        self._steps: tuple[Callable[[Tensor], Tensor], ...] = ()
        self._lock = Lock()

    @property
    def held(self) -> int:
        """The bytes that are kept alive beside the result."""
        if self.work is None or self._sent is None or _same_memory(self._sent, self._out):
            return 0
        return self._out.nbytes + self._sent.nbytes

    def keep(self, tensor: Any, local: Tensor) -> AsyncResult:
        """Keep ``tensor`` while its ``local`` memory is being sent: autograd writes to gradients that nobody holds."""
        if self.work is not None and self._sent is not None and _same_memory(self._sent, local):
            self._kept = tensor
        return self

    def then(self, step: Callable[[Tensor], Tensor]) -> AsyncResult:
        """Do this with the result when it is waited for; local work only. The object itself comes back."""
        if self.work is None:
            self._out = step(self._out)
        else:
            self._steps += (step,)
        return self

    def wait(self) -> Tensor:
        """The result. Raises what the process group raises."""
        if self.work is None:
            return self._out
        with self._lock:  # another thread, such as autograd's, may want the same tensor
            if self.work is not None:
                self.work.wait()
                while self._steps:  # one that fails is tried again by the next wait, those before it are not
                    self._out = self._steps[0](self._out)
                    self._steps = self._steps[1:]
                self.work, self._sent, self._kept = None, None, None
        return self._out

    def __del__(self) -> None:
        if self.work is not None:
            with suppress(Exception):  # nobody is left to tell, and the process group may be gone
                self.work.wait()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return memory_of(a) == memory_of(b)


class SendReceive:
    """What sends and what receives, as one. Backends make no future of these: they are finished when waited for."""

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
    """The collectives of a backward pass: as many may be under way as hold ``limit`` bytes, and always one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._results: deque[tuple[ref[AsyncResult], int]] = deque()

    def add(self, result: AsyncResult) -> None:
        """Count one more in, and wait for the oldest where they hold too much."""
        self._results.append((ref(result), result.held))
        self._held += result.held
        while len(self._results) > 1 and (self._held > self._limit or _landed(self._results[0][0]())):
            oldest, held = self._results.popleft()
            self._held -= held
            waited = oldest()
            if waited is not None:
                waited.wait()


def _landed(result: AsyncResult | None) -> bool:
    return result is None or result.work is None
