"""Strided shards: a dim that is sharded inside, read as several dims of which one is sharded.

``[b, s, d]`` with ``s`` sharded, viewed as ``[b * s, d]``: each rank holds ``b`` blocks of rows. Torch writes this as
``_StridedShard(0, split_factor=b)``: the local dim is split into ``b`` pieces, and each of them over the mesh dim. Here
the dim is read as the factors ``(b, s)`` again, and the placement as a shard of the second factor. All arithmetic of
shards then holds as it is.

A split factor counts what earlier mesh dims leave. With 8 elements on a (2, 2) mesh, [S(0), _S(0, 2)] has the factors
``(4, 2)``: mesh dim 0 leaves 2 of the 4, and mesh dim 1 splits the 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any

from attrs import frozen

from shardwise.errors import LayoutError, PlacementError
from shardwise.kernel.placements import Placement, Shard, StridedShard, shard, show_all, split_factor, strided_shard
from shardwise.kernel.symbols import is_symbolic

__all__ = [
    "Factors",
    "Scattered",
    "factors_of",
    "flat_placements",
    "has_factors",
    "refined",
    "runs_of",
    "unflattened_placements",
]

#: Per tensor dim, the sizes whose product it is, the outermost first; one size for a dim that is not split inside.
Factors = tuple[tuple[Any, ...], ...]


@frozen
class Scattered:
    """In place of the offset of a part that is several blocks of its dim. Whatever counts with it raises."""

    dim: int

    def _refuse(self, *_: Any) -> Any:
        raise LayoutError(
            asked=f"use the offset of this rank's part along dim {self.dim}",
            found="the dim has a strided shard, so the part is several blocks of it",
            do="Redistribute to Shard(d) first. A rule that needs an offset says so by a lowering on the row.",
            dim=self.dim,
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __index__ = __int__ = _refuse


@frozen
class _Factor:
    """One factor of a dim: its size, over how many ranks it is sharded so far, and what the first of them has."""

    size: Any
    local: Any
    ranks: int = 1

    @classmethod
    def whole(cls, size: Any) -> _Factor:
        return cls(size, size)

    @property
    def is_even(self) -> bool:
        return bool(self.local * self.ranks == self.size)

    def over(self, ranks: int) -> _Factor:
        """The factor sharded over ``ranks`` more."""
        return _Factor(self.size, -(-self.local // ranks), self.ranks * ranks)

    def split(self, outer: int) -> tuple[_Factor, _Factor] | None:
        """The factor as two, ``outer`` the local size of the first; it is the first that is sharded so far."""
        rest = self.local // outer
        if not self.is_even or rest * outer != self.local:
            return None
        return _Factor(outer * self.ranks, outer, self.ranks), _Factor.whole(rest)


def _split_dim(
    factors: list[_Factor], splits: Iterable[tuple[int, int, int]], *, may_split: bool
) -> tuple[list[_Factor], dict[int, int]] | None:
    """The factors of one dim after these splits, and the factor that each mesh dim shards.

    ``splits`` holds mesh dim, number of ranks and split factor. ``None`` where one of them does not shard one factor.
    """
    sharded: dict[int, int] = {}
    for mesh_dim, ranks, pieces in splits:
        at, outer = 0, 1
        while at < len(factors) and outer * factors[at].local <= pieces:
            if outer == pieces and (factors[at].local != 1 or at + 1 == len(factors)):
                break
            outer *= factors[at].local
            at += 1
        if outer != pieces:
            inside = pieces // outer
            parts = factors[at].split(inside) if may_split and at < len(factors) and inside else None
            if parts is None or inside * outer != pieces:
                return None
            factors[at : at + 1] = parts
            sharded = {m: k + 1 if k > at else k for m, k in sharded.items()}
            at += 1
        elif at == len(factors):
            if not may_split or not factors[-1].is_even:
                return None
            factors.append(_Factor.whole(1))
        factors[at] = factors[at].over(ranks)
        if at + 1 < len(factors) and not factors[at].is_even:
            return None
        sharded[mesh_dim] = at
    return factors, sharded


def _splits(placements: Sequence[Placement], mesh_shape: Sequence[int], dim: int) -> list[tuple[int, int, int]]:
    return [
        (m, mesh_shape[m], split_factor(p))
        for m, p in enumerate(placements)
        if isinstance(p, (Shard, StridedShard)) and p.dim == dim and mesh_shape[m] > 1
    ]


def factors_of(shape: Sequence[Any], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> Factors:
    """The fewest factors of each dim with which every placement shards one factor.

    Raises :class:`PlacementError` where there are none: a split factor must divide what earlier mesh dims leave of the
    dim, and every mesh dim must divide the factor that it shards unless that is the last one of its dim.
    """
    factors: list[tuple[Any, ...]] = []
    strided = {p.dim for p in placements if isinstance(p, StridedShard)}
    for dim, size in enumerate(shape):
        split = None
        if dim in strided and size:
            split = _split_dim([_Factor.whole(size)], _splits(placements, mesh_shape, dim), may_split=True)
            if split is None:
                raise PlacementError(
                    asked=f"place a tensor of shape {tuple(shape)} by {show_all(placements)}",
                    found=f"on a mesh of shape {tuple(mesh_shape)}, the pieces of dim {dim} would not have one size",
                    do="Use a split factor and mesh dims that divide the dim, or Shard(d).",
                    placements=tuple(placements),
                )
        factors.append((size,) if split is None else tuple(f.size for f in split[0]))
    return tuple(factors)


def has_factors(shape: Sequence[Any], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> bool:
    """Whether a tensor can have this layout: :func:`factors_of` does not raise."""
    try:
        factors_of(shape, placements, mesh_shape)
    except PlacementError:
        return False
    return True


def unflattened_placements(
    placements: Sequence[Placement], mesh_shape: Sequence[int], factors: Factors
) -> tuple[Placement, ...] | None:
    """The same layout for the tensor whose dims are the factors; ``None`` where it is none of plain shards."""
    unflattened = list(placements)
    start = 0
    for dim, sizes in enumerate(factors):
        of_dim = [m for m, p in enumerate(placements) if isinstance(p, (Shard, StridedShard)) and p.dim == dim]
        sharded = dict.fromkeys(of_dim, 0)
        if len(sizes) > 1:
            splits = _splits(placements, mesh_shape, dim)
            split = _split_dim([_Factor.whole(n) for n in sizes], splits, may_split=False)
            if split is None:
                return None
            sharded.update(split[1])
        for m in of_dim:
            unflattened[m] = shard(start + sharded[m])
        start += len(sizes)
    return tuple(unflattened)


def flat_placements(
    placements: Sequence[Placement], mesh_shape: Sequence[int], factors: Factors
) -> tuple[Placement, ...]:
    """The placements of the tensor, from those of the tensor whose dims are the factors."""
    places = [(dim, k) for dim, sizes in enumerate(factors) for k in range(len(sizes))]
    left = [list(sizes) for sizes in factors]
    flat = list(placements)
    for m, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim, k = places[placement.dim]
            flat[m] = strided_shard(dim, math.prod(left[dim][:k]))
            left[dim][k] = -(-left[dim][k] // mesh_shape[m])
    return tuple(flat)


def runs_of(factors: Sequence[int], sizes: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """The runs of one dim that a part consists of: where each starts in the dim, how long it is, where in the part.

    ``sizes`` and ``starts`` are those of the part along the factors. Runs that meet are one.
    """
    runs: list[tuple[int, int, int]] = []
    steps = [math.prod(factors[k + 1 :]) for k in range(len(factors))]
    length, local = sizes[-1], 0
    for outer in product(*(range(a, a + n) for a, n in zip(starts[:-1], sizes[:-1], strict=True))):
        start = sum(i * step for i, step in zip((*outer, starts[-1]), steps, strict=True))
        if runs and runs[-1][0] + runs[-1][1] == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + length, runs[-1][2])
        else:
            runs.append((start, length, local))
        local += length
    return runs


def refined(one: Factors, other: Factors) -> Factors | None:
    """The fewest factors of which both are made; ``None`` where the pieces of one cross those of the other."""
    return None if None in (found := [_refined(a, b) for a, b in zip(one, other, strict=True)]) else tuple(found)  # type: ignore[arg-type]


def _refined(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if len(one) == 1 or one == other:
        return other
    if len(other) == 1:
        return one
    if is_symbolic((*one[:-1], *other[:-1])):
        return None
    # A last factor may be a symbol, and the borders in front of it are numbers.
    borders = sorted({math.prod(sizes[:k]) for sizes in (one, other) for k in range(len(sizes))})
    if any(b % a for a, b in pairwise(borders)):
        return None
    total = math.prod(one)
    return (*(b // a for a, b in pairwise(borders)), total // borders[-1])
