"""Collectives that start together are issued as one: all-gathers, all-reduces and reduce-scatters of equal pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from shardwise.comm.collective_log import CollectiveLog
from shardwise.comm.events import Event, emit, observers

__all__ = ["Batch", "coalesced", "open_batch"]


class _Issuer(Protocol):
    """What a batch needs of a group."""

    log: CollectiveLog

    def issue_coalesced(self, kind: str, reduction: str, outs: list[Tensor], pieces: list[Tensor]) -> Any:
        """Issue several collectives of one kind as one; the result is a work."""

    def emit_issued(self, kind: str, nbytes: int, work: Any) -> Event:
        """Emit the event of a collective that was issued."""


class _Coalesced:
    """Collectives of one kind, group and dtype; the work of each of their results."""

    def __init__(self, batch: Batch, group: _Issuer, kind: str, reduction: str) -> None:
        self.outs: list[Tensor] = []
        self.pieces: list[Tensor] = []
        self._batch: Batch | None = batch
        self._group = group
        self._kind, self._reduction = kind, reduction
        self._work: Any = None
        self._event: Event | None = None
        self.number = 0  # in the log of the group; 0 until it is issued
        # The collector may run in the wait, and find another result of this batch, whose end waits, too.
        self._lock = threading.RLock()

    def issue(self) -> None:
        self._work = self._group.issue_coalesced(self._kind, self._reduction, self.outs, self.pieces)
        self.number = self._group.log.count
        if observers:
            self._event = self._group.emit_issued(self._kind, sum(p.nbytes for p in self.pieces), self._work)
        self._batch, self.outs, self.pieces = None, [], []  # each result holds its own tensors

    def wait(self) -> None:
        if self._batch is not None:  # waited for before the end of the block
            self._batch.issue()
        with self._lock:  # the wait may unpack, and that must be over before any result is read
            if self._work is not None:
                if self._event is not None:
                    emit(self._event, "waiting")
                self._work.wait()
                self._work = None
                if self._event is not None:
                    emit(self._event, "waited")


class Batch:
    """The collectives that started since the last issue, in order."""

    def __init__(self) -> None:
        self._pending: dict[Any, _Coalesced] = {}

    def add(self, group: _Issuer, kind: str, out: Tensor, piece: Tensor, reduction: str = "") -> _Coalesced:
        """Add a collective of a group; the result is its work. An all-reduce has one tensor as both."""
        key = group, kind, reduction, piece.dtype, piece.device
        collectives = self._pending.get(key)
        if collectives is None:
            collectives = self._pending[key] = _Coalesced(self, group, kind, reduction)
        collectives.outs.append(out)
        collectives.pieces.append(piece)
        return collectives

    def issue(self) -> None:
        """Issue one collective per group, kind and dtype."""
        pending, self._pending = self._pending, {}
        for collectives in pending.values():
            collectives.issue()


class _OpenBatch(threading.local):
    """The batch of this thread that is open, if any."""

    batch: Batch | None = None


open_batch = _OpenBatch()


@contextmanager
def coalesced() -> Iterator[Batch]:
    """Issue the collectives that start in the block as one per group, kind and dtype, at its end or at the first wait.

    One collective of many parts costs the latency of one. Every rank must start the same ones in the same order.
    """
    outer, open_batch.batch = open_batch.batch, Batch()
    try:
        yield open_batch.batch
        open_batch.batch.issue()
    finally:
        open_batch.batch = outer
