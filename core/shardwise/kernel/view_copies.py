"""Views that are copies: their operand was redistributed, so they do not share memory with their base.

A program must not see the difference. So such a copy knows where it comes from: it is brought up to date before it is
read after a write to its base, and what is written to it is written to its base, too. Nothing of this costs a tensor
that shares memory with its base anything.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.private_torch.dispatch import memory_of

__all__ = ["Source", "Writes", "fresh", "fresh_operand", "note_write", "source_of_copy", "tie", "watched", "writes_of"]


class Writes:
    """How often ops on MeshTensors have written some memory; the same on every rank."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class Source(Protocol):
    """Where a copy comes from."""

    def refresh(self, local: torch.Tensor) -> None:
        """Bring the copy's local tensor up to date, if its base was written."""

    def check_writable(self) -> None:
        """Raise :class:`InPlaceError` if what is written to the copy cannot be written to its base."""

    def write(self, copy: Any) -> None:
        """Write the values of the copy, a MeshTensor, to its base."""


# By the local tensor of a copy.
_sources: Any = WeakIdKeyDictionary()

watched: dict[int, weakref.ref[Writes]] = {}
"""By memory, the writes to bases of copies that are alive. Handlers of ops that write ask whether it is empty."""


def tie(local: torch.Tensor, source: Source) -> None:
    """Note where the copy with this local tensor comes from."""
    _sources[local] = source


def source_of_copy(local: torch.Tensor) -> Source | None:
    """Where the copy with this local tensor comes from, if it was noted."""
    source: Source | None = _sources.get(local)
    return source


def writes_of(local: torch.Tensor) -> Writes:
    """The writes to the memory of a base's local tensor. They are counted as long as the result is alive."""
    memory = memory_of(local)
    known = watched.get(memory)
    writes = None if known is None else known()
    if writes is None:
        writes = Writes()

        def forget(gone: weakref.ref[Writes]) -> None:
            if watched.get(memory) is gone:
                del watched[memory]

        watched[memory] = weakref.ref(writes, forget)
    return writes


def note_write(local: torch.Tensor) -> None:
    """Note that an op has written the memory of a local tensor."""
    known = watched.get(memory_of(local))
    writes = None if known is None else known()
    if writes is not None:
        writes.count += 1


def fresh(local: torch.Tensor) -> torch.Tensor:
    """The local tensor of a copy, up to date."""
    source = _sources.get(local)
    if source is not None:
        source.refresh(local)
    return local


def fresh_operand(local: torch.Tensor, _tensor: Any) -> torch.Tensor:
    """:func:`fresh`, as a plan calls it."""
    return fresh(local)
