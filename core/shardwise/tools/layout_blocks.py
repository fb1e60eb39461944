"""The blocks that a layout cuts a tensor into, and the ranks that hold each: plain arithmetic on a spec."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from attrs import field, frozen

from shardwise.kernel.mesh import Mesh, coordinates
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.modes import outside_modes

__all__ = ["Cell", "LayoutBlocks", "blocks_of", "ranks_text"]

Interval = tuple[int, int]


@frozen
class Cell:
    """A block of the tensor that no rank's part cuts: an interval per sharded dim, and who holds it.

    ``holders`` are groups of ranks. The ranks of one group have copies of the same values; where there are several
    groups, each has a partial value, and the value is their reduction.
    """

    intervals: tuple[Interval, ...]
    holders: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold the block or a partial value of it, in order."""
        return tuple(sorted(rank for group in self.holders for rank in group))


@frozen
class LayoutBlocks:
    """A layout in blocks.

    ``rows`` and ``columns`` are the dims that are drawn, ``None`` where the tensor has fewer; ``others`` are further
    dims that are sharded, and ``whole`` those that no mesh dim shards and that are not drawn. ``empty`` are the ranks
    that hold no element.
    """

    spec: TensorSpec
    rows: int | None
    columns: int | None
    others: tuple[int, ...]
    whole: tuple[int, ...]
    cuts: dict[int, tuple[Interval, ...]] = field(repr=False)
    cells: dict[tuple[Interval, ...], Cell] = field(repr=False)
    empty: tuple[int, ...]

    @property
    def drawn(self) -> tuple[int, ...]:
        """The dims that a cell has an interval of, in the order of its intervals."""
        return tuple(d for d in (*self.others, self.rows, self.columns) if d is not None)

    def panels(self) -> Iterator[tuple[Interval, ...]]:
        """The intervals of the sharded dims that are not drawn: a picture for each."""
        return product(*(self.cuts[d] for d in self.others))

    def cell(self, panel: tuple[Interval, ...], row: Interval | None, column: Interval | None) -> Cell:
        """The cell of a panel's row and column."""
        return self.cells[(*panel, *(i for i in (row, column) if i is not None))]


def blocks_of(spec: TensorSpec, dims: Sequence[int] | None = None) -> LayoutBlocks:
    """The blocks of a layout. Drawn are ``dims`` (one or two), or else the two dims with most shards."""
    shards = spec.shards_per_dim
    if dims is None:
        most = sorted(range(spec.ndim), key=lambda d: (-shards[d], d))[:2]
        shown = sorted(most)
    else:
        shown = [d % spec.ndim for d in dims]
    rows, columns = (None, None) if not shown else (None, shown[0]) if len(shown) == 1 else (shown[0], shown[1])
    others = tuple(d for d in range(spec.ndim) if shards[d] > 1 and d not in shown)
    whole = tuple(d for d in range(spec.ndim) if shards[d] == 1 and d not in shown)
    drawn = (*others, *(d for d in (rows, columns) if d is not None))
    ranks = ranks_by_coordinate(spec.mesh, spec.mesh_shape)
    boxes: dict[tuple[int, ...], list[tuple[Interval, ...]]] = {}
    for at in ranks:
        blocks = spec.blocks(at) if math.prod(spec.shape) else []
        boxes[at] = [tuple((b.offset[d], b.offset[d] + b.size[d]) for d in drawn) for b in blocks if math.prod(b.size)]
    cuts = {
        d: _cuts(spec.shape[d], (box[i] for of_rank in boxes.values() for box in of_rank)) for i, d in enumerate(drawn)
    }
    held: dict[tuple[Interval, ...], dict[tuple[int, ...], list[int]]] = {
        intervals: {} for intervals in product(*(cuts[d] for d in drawn))
    }
    partial_dims = sorted(spec.reductions)
    for at, of_rank in boxes.items():
        part = tuple(at[m] for m in partial_dims)
        for box in of_rank:
            inside = [
                [i for i in cuts[d] if low <= i[0] and i[1] <= high] for d, (low, high) in zip(drawn, box, strict=True)
            ]
            for intervals in product(*inside):
                held[intervals].setdefault(part, []).append(ranks[at])
    cells = {
        intervals: Cell(intervals, tuple(tuple(sorted(group)) for _, group in sorted(groups.items())))
        for intervals, groups in held.items()
    }
    empty = tuple(sorted(ranks[at] for at, of_rank in boxes.items() if not of_rank))
    return LayoutBlocks(spec, rows, columns, others, whole, cuts, cells, empty)


def ranks_by_coordinate(mesh: Mesh, shape: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """The number of each rank of a mesh; without devices, that of its coordinate in row-major order."""
    numbers: Sequence[int] = range(math.prod(shape))
    if hasattr(mesh, "mesh"):
        with outside_modes():
            numbers = mesh.mesh.flatten().tolist()
    return dict(zip(coordinates(shape), numbers, strict=True))


def _cuts(size: int, intervals: Iterator[Interval]) -> tuple[Interval, ...]:
    if not size:
        return ()
    return tuple(pairwise(sorted({0, size, *(end for interval in intervals for end in interval)})))


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6, and ``0-24 by 8`` for 0, 8, 16, 24."""
    ordered = sorted(ranks)
    steps = {high - low for low, high in pairwise(ordered)}
    if len(ordered) >= _PROGRESSION and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}-{ordered[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(_run_text(low, high) for low, high in runs)


_PROGRESSION = 4  # ranks that are rather written as first, last and step


def _run_text(low: int, high: int) -> str:
    return str(low) if low == high else f"{low},{high}" if high == low + 1 else f"{low}-{high}"
