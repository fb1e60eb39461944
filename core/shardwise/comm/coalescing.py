"""All-gathers that start together are issued as one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.comm.events import Event, emit, observers

__all__ = ["GatherBatch", "coalesced", "open_batch"]


class _CoalescedGather:
    """All-gathers of one group and dtype; the work of each of their results."""

    def __init__(self, batch: GatherBatch, group: Any) -> None:
        self.outs: list[Tensor] = []
        self.pieces: list[Tensor] = []
        self._batch: GatherBatch | None = batch
        self._group = group
        self._work: Any = None
        self._event: Event | None = None

    def issue(self) -> None:
        self._work = self._group.gather_coalesced(self.outs, self.pieces)
        if observers:
            self._event = self._group.emit_issued("all_gather", sum(p.nbytes for p in self.pieces), self._work)
        self._batch, self.outs, self.pieces = None, [], []  # each result holds its own tensors

    def wait(self) -> None:
        if self._batch is not None:  # waited for before the end of the block
            self._batch.issue()
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._event is not None:
                emit(self._event, "waited")


class GatherBatch:
    """The all-gathers that started since the last issue, in order."""

    def __init__(self) -> None:
        self._pending: dict[Any, _CoalescedGather] = {}

    def add(self, group: Any, out: Tensor, piece: Tensor) -> _CoalescedGather:
        """Add an all-gather of a group; the result is its work."""
        key = group, piece.dtype, piece.device
        gather = self._pending.get(key)
        if gather is None:
            gather = self._pending[key] = _CoalescedGather(self, group)
        gather.outs.append(out)
        gather.pieces.append(piece)
        return gather

    def issue(self) -> None:
        """Issue one all-gather per group and dtype."""
        gathers, self._pending = self._pending, {}
        for gather in gathers.values():
            gather.issue()


class _OpenBatch(threading.local):
    """The batch of this thread that is open, if any."""

    batch: GatherBatch | None = None


open_batch = _OpenBatch()


@contextmanager
def coalesced() -> Iterator[None]:
    """Issue the all-gathers that start in the block as one per group and dtype, at its end or at the first wait.

    One collective of many parts costs the latency of one. Every rank must start the same ones in the same order.
    """
    outer, open_batch.batch = open_batch.batch, GatherBatch()
    try:
        yield
        open_batch.batch.issue()
    finally:
        open_batch.batch = outer
