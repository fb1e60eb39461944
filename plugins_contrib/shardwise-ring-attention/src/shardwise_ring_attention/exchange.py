"""Exchange of positions within a ring, from one layout to another: an all-to-all per tensor."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from shardwise.rule import LocalCall
from shardwise_ring_attention.geometry import Range, Ranges, length, overlaps
from shardwise_ring_attention.place import SEQUENCE, Place

__all__ = ["cut", "exchange"]

Layouts = tuple[Ranges, ...]


def cut(tensor: Tensor, positions: Range) -> Tensor:
    """A view of some positions of a tensor, counted in local memory."""
    return tensor.narrow(SEQUENCE, positions[0], positions[1] - positions[0])


def exchange(local: LocalCall, at: Place, tensor: Tensor, have: Layouts, want: Layouts) -> Tensor:
    """The tensor with the positions that ``want`` gives this rank; ``have`` says who holds which, by ring place."""
    if have == want:
        return tensor
    mine, ranks = have[at.index], range(at.size)
    incoming = [overlaps(have[source], want[at.index]) for source in ranks]
    received = local.comm.all_to_all(
        [_joined(tensor, [cut(tensor, _within(mine, part)) for part in overlaps(mine, want[rank])]) for rank in ranks],
        at.ring,
        [_resized(tensor, length(tuple(parts))) for parts in incoming],
    )
    by_start: list[tuple[int, Tensor]] = []
    for parts, run in zip(incoming, received, strict=True):
        pieces = torch.split(run, [stop - start for start, stop in parts], SEQUENCE)
        by_start += [(start, piece) for (start, _), piece in zip(parts, pieces, strict=True)]
    return _joined(tensor, [piece for _, piece in sorted(by_start, key=itemgetter(0))])


def _joined(tensor: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, SEQUENCE) if parts else tensor.new_empty(_resized(tensor, 0))


def _resized(tensor: Tensor, count: int) -> list[int]:
    """The shape of a tensor with ``count`` positions."""
    return [count if d == SEQUENCE else n for d, n in enumerate(tensor.shape)]


def _within(ranges: Ranges, part: Range) -> Range:
    """Where a part of a rank's positions lies in its memory."""
    at = 0
    for start, stop in ranges:
        if start <= part[0] < stop:
            return part[0] - start + at, part[1] - start + at
        at += stop - start
    raise AssertionError(f"{part} is not within {ranges}")
