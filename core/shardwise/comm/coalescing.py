"""All-gathers that start together go out as one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.comm.events import Event, emit, observers

__all__ = ["coalesced"]

# -- several at a time -----------------------------------------------------------------------------------------------


class _CoalescedGather:
    """All-gathers of one group and dtype; the work of each of their results."""

    def __init__(self, batch: _Batch, group: Any) -> None:
        self.outs: list[Tensor] = []
        self.pieces: list[Tensor] = []
        self._batch: _Batch | None = batch
        self._group = group
        self._work: Any = None
        self._event: Event | None = None

    def issue(self) -> None:
        self._work = self._group.gather_coalesced(self.outs, self.pieces)
        if observers:
            self._event = self._group.emit_issued("all_gather", sum(p.nbytes for p in self.pieces), self._work)
        self._batch, self.outs, self.pieces = None, [], []  # each result holds what is its own

    def wait(self) -> None:
        if self._batch is not None:  # wanted before the others are there
            self._batch.issue()
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._event is not None:
                emit(self._event, "waited")


class _Batch:
    """What was to be gathered since the last issue, in the order in which it came."""

    def __init__(self) -> None:
        self._waiting: dict[Any, _CoalescedGather] = {}

    def add(self, group: Any, out: Tensor, piece: Tensor) -> _CoalescedGather:
        key = group, piece.dtype, piece.device
        gather = self._waiting.get(key)
        if gather is None:
            gather = self._waiting[key] = _CoalescedGather(self, group)
        gather.outs.append(out)
        gather.pieces.append(piece)
        return gather

    def issue(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for gather in waiting.values():
            gather.issue()


class _Here(threading.local):
    """The batch of this thread, if it has one open."""

    batch: _Batch | None = None


_here = _Here()


@contextmanager
def coalesced() -> Iterator[None]:
    """Issue the all-gathers that start in the block as one per group and dtype, at its end or at the first wait.

    One collective of many parts costs the latency of one. All ranks must start the same ones in the same order.
    """
    outer, _here.batch = _here.batch, _Batch()
    try:
        yield
        _here.batch.issue()
    finally:
        _here.batch = outer
