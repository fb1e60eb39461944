"""From one layout of positions to another, within a ring: one all-to-all per dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from shardwise.rule import LocalCall
from torch import Tensor

from shardwise_ring_attention.geometry import Range, Ranges, length, overlaps
from shardwise_ring_attention.place import SEQUENCE, Place

__all__ = ["cut", "exchange"]

Layouts = tuple[Ranges, ...]


def cut(tensor: Tensor, positions: Range) -> Tensor:
    """Some positions of a tensor, by their place in local memory; a view."""
    return tensor.narrow(SEQUENCE, positions[0], positions[1] - positions[0])


def exchange(local: LocalCall, at: Place, tensors: Sequence[Tensor], have: Layouts, want: Layouts) -> list[Tensor]:
    """The tensors with the positions that ``want`` gives this rank; ``have`` says who holds which, by place in the ring."""
    if have == want:
        return list(tensors)
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        moved = _exchange(local, at, [tensors[i] for i in alike], have, want)
        found.update(zip(alike, moved, strict=True))
    return [found[i] for i in range(len(tensors))]


def _exchange(local: LocalCall, at: Place, tensors: Sequence[Tensor], have: Layouts, want: Layouts) -> list[Tensor]:
    ranks = range(at.size)
    mine = have[at.index]
    sent = [_packed(cut(t, _within(mine, part)) for t in tensors for part in overlaps(mine, want[d])) for d in ranks]
    sent = [tensors[0].new_empty(0) if flat is None else flat for flat in sent]
    parts = [overlaps(have[source], want[at.index]) for source in ranks]
    widths = [_width(tensor) for tensor in tensors]
    shapes = [(length(tuple(part)) * sum(widths),) for part in parts]
    received = local.comm.all_to_all(sent, at.ring, shapes)
    return [_arranged(tensor, i, widths, parts, received) for i, tensor in enumerate(tensors)]


def _packed(parts: Iterable[Tensor]) -> Tensor | None:
    flat = [part.reshape(-1) for part in parts]
    return torch.cat(flat) if flat else None


def _within(ranges: Ranges, part: Range) -> Range:
    """Where a part of a rank's positions lies in its memory."""
    at = 0
    for start, stop in ranges:
        if start <= part[0] < stop:
            return part[0] - start + at, part[1] - start + at
        at += stop - start
    raise AssertionError(f"{part} is not within {ranges}")


def _width(tensor: Tensor) -> int:
    """How many elements a position has."""
    return prod(n for d, n in enumerate(tensor.shape) if d != SEQUENCE)


def _arranged(
    tensor: Tensor, i: int, widths: Sequence[int], parts: Sequence[Sequence[Range]], received: Sequence[Tensor]
) -> Tensor:
    """One of the tensors, of what each rank sent of it."""
    found: list[tuple[int, Tensor]] = []
    for source, flat in zip(parts, received, strict=True):
        total = length(tuple(source))
        own = flat.split([total * width for width in widths])[i]
        sizes = [stop - start for start, stop in source]
        runs = own.split([size * widths[i] for size in sizes])
        for (start, _), size, run in zip(source, sizes, runs, strict=True):
            found.append((start, run.view(_with_positions(tensor, size))))
    if not found:
        return tensor.new_empty(_with_positions(tensor, 0))
    return torch.cat([part for _, part in sorted(found, key=lambda pair: pair[0])], SEQUENCE)


def _with_positions(tensor: Tensor, count: int) -> list[int]:
    return [count if d == SEQUENCE else n for d, n in enumerate(tensor.shape)]
