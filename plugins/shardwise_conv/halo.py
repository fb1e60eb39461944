"""Halo exchange: a rank fetches the positions of its neighbours that its own part of a result needs.

A window slides over a sharded dim. For its outputs, a rank needs a run of input positions that begins and ends in its
neighbours' shards, or beyond them where shards are small. Sizes alone say who has what and who needs what, so one
exchange brings exactly the missing positions. In the backward, their gradients go back to their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import LocalCall, TensorSpec

__all__ = ["Exchange", "Reach", "Run", "fetched", "reached", "returned", "runs"]


@frozen
class Run:
    """Positions ``start`` to ``stop`` of one dim."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def shared(self, other: Run) -> Run:
        """The positions of both."""
        start = max(self.start, other.start)
        return Run(start, max(start, min(self.stop, other.stop)))


@frozen
class Reach:
    """The input positions that some outputs need: those inside the input, and how many lie before and after it."""

    inside: Run
    before: int
    after: int


def reached(first: int, last: int, size: int) -> Reach:
    """The reach of the window ``first`` to ``last`` (exclusive) over a dim of ``size``."""
    total = max(0, last - first)
    inside = Run(min(max(first, 0), size), min(max(last, 0), size))
    before = min(max(0, -first), total)
    return Reach(inside, before, total - before - len(inside))


def runs(local: LocalCall, spec: TensorSpec, dim: int, mesh_dims: Sequence[int]) -> list[Run]:
    """The run of a dim that each rank along some mesh dims holds, row-major."""
    held = []
    for position in product(*(range(spec.mesh_shape[m]) for m in mesh_dims)):
        where = list(local.coordinate)
        for m, i in zip(mesh_dims, position, strict=True):
            where[m] = i
        shape, offset = spec.local_shape_and_offset(where)
        held.append(Run(offset[dim], offset[dim] + shape[dim]))
    return held


@frozen
class Exchange:
    """One dim over one line of ranks: the run that each holds, the run that each needs, and this rank's place."""

    dim: int
    mesh_dims: tuple[int, ...]
    held: tuple[Run, ...]
    needed: tuple[Run, ...]
    at: int


def _shape(x: Tensor, dim: int, length: int) -> list[int]:
    return [length if d == dim else n for d, n in enumerate(x.shape)]


def _cut(x: Tensor, dim: int, whole: Run, part: Run) -> Tensor:
    return x.narrow(dim, part.start - whole.start if len(part) else 0, len(part))


def _exchanged(
    local: LocalCall, x: Tensor, along: Exchange, held: Sequence[Run], needed: Sequence[Run]
) -> list[Tensor]:
    """From each rank, the part of its run that this rank needs; this rank's own part is not sent."""
    mine, asked = held[along.at], needed[along.at]
    others = [i != along.at for i in range(len(held))]
    sent = [
        _cut(x, along.dim, mine, mine.shared(run) if other else Run(0, 0))
        for run, other in zip(needed, others, strict=True)
    ]
    shapes = [
        _shape(x, along.dim, len(run.shared(asked)) if other else 0) for run, other in zip(held, others, strict=True)
    ]
    parts = local.comm.all_to_all(sent, along.mesh_dims, shapes)
    parts[along.at] = _cut(x, along.dim, mine, mine.shared(asked))
    return parts


def fetched(local: LocalCall, x: Tensor, along: Exchange) -> Tensor:
    """The run that this rank needs, from its own shard and from those of others."""
    return torch.cat(_exchanged(local, x, along, along.held, along.needed), along.dim)


def returned(local: LocalCall, gradient: Tensor, along: Exchange) -> Tensor:
    """The gradient by this rank's own shard: the sum of the gradients by the parts that each rank fetched of it."""
    mine = along.held[along.at]
    total = gradient.new_zeros(_shape(gradient, along.dim, len(mine)))
    for run, part in zip(along.needed, _exchanged(local, gradient, along, along.needed, along.held), strict=True):
        if part.shape[along.dim]:
            total.narrow(along.dim, run.shared(mine).start - mine.start, part.shape[along.dim]).add_(part)
    return total
