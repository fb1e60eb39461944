"""What hypothesis draws for tests of rules and programs: shapes, meshes, placements, specs, and calls of an op.

All shrink to what is simple: one rank, one dim of one element, replicated, the first call that the schema suggests.
hypothesis comes with the extra ``shardwise[test]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch

from shardwise.errors import ShardingError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, Placement, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.signature import Op, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.ops import OpLike
from shardwise.testing.partials import can_be_partial
from shardwise.testing.schema_samples import SIZE_NAMES, Pattern, calls_of, patterns_of, redrawn
from shardwise.testing.values import Sample, one_op

try:
    from hypothesis import assume
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ImportError as error:
    raise ImportError("shardwise.testing.strategies needs hypothesis: pip install 'shardwise[test]'") from error

__all__ = ["grids", "mesh_shapes", "placements", "samples", "shapes", "specs"]


def sizes(max_size: int = 9, *, empty: bool = True) -> SearchStrategy[int]:
    """The size of a dim, from 1 up; 0 is the last choice, if ``empty``."""
    # One choice among all sizes: of two alternatives hypothesis would take 0 as the simpler; it has fewer choices.
    return st.sampled_from([*range(1, max_size + 1), *([0] if empty else [])])


def shapes(
    min_ndim: int = 0, max_ndim: int = 4, *, max_size: int = 9, empty: bool = True
) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of ``min_ndim`` to ``max_ndim`` dims, each of at most ``max_size`` elements; with ``empty`` also of none.

    About half of the sizes are uneven over a mesh.
    """
    return st.lists(sizes(max_size, empty=empty), min_size=min_ndim, max_size=max_ndim).map(tuple)


def mesh_shapes(max_ndim: int = 3, *, max_size: int = 8, ranks: int | None = None) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of meshes of 1 to ``max_ndim`` dims and at most ``max_size`` ranks. ``ranks`` is the exact number, if
    given: the meshes of a pool have all its ranks.
    """
    counts = range(1, max_size + 1) if ranks is None else (ranks,)
    shapes = sorted((g for n in counts for g in grids(n, max_ndim)), key=lambda grid: (len(grid), prod(grid), grid))
    return st.sampled_from(shapes)


@cache
def grids(ranks: int, max_ndim: int) -> tuple[tuple[int, ...], ...]:
    """All shapes of meshes of so many ranks, dims of size 1 included."""
    if max_ndim == 1:
        return ((ranks,),)
    shapes: list[tuple[int, ...]] = [(ranks,)]
    for n in range(1, ranks + 1):
        if ranks % n == 0:
            shapes += [(n, *rest) for rest in grids(ranks // n, max_ndim - 1)]
    return tuple(shapes)


def placements(
    shape: Sequence[int],
    mesh_ndim: int,
    *,
    kinds: Sequence[str] = REDUCE_OPS,
    dtype: torch.dtype = torch.float32,
) -> SearchStrategy[tuple[Placement, ...]]:
    """One placement per mesh dim for a tensor of this shape: replicated first, then sharded on a dim, then partial.

    ``kinds`` are the reductions to draw from; pass ``()`` for no partial placement. Those that ``dtype`` cannot have
    are left out.
    """
    partials = [partial(kind) for kind in kinds if can_be_partial(kind, dtype)]
    one = st.sampled_from([REPLICATE, *map(shard, range(len(shape))), *partials])
    return st.lists(one, min_size=mesh_ndim, max_size=mesh_ndim).map(tuple)


@st.composite
def specs(
    draw: st.DrawFn,
    mesh: AbstractMesh | None = None,
    shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = REDUCE_OPS,
) -> TensorSpec:
    """Specs of a contiguous tensor on a mesh without devices; what is not given is drawn."""
    grid = AbstractMesh(draw(mesh_shapes())) if mesh is None else mesh
    size = draw(shapes()) if shape is None else tuple(shape)
    layout = draw(placements(size, grid.ndim, kinds=kinds, dtype=dtype))
    return TensorSpec(grid, layout, TensorMeta.contiguous(size, dtype))


@st.composite
def samples(draw: st.DrawFn, op: OpLike) -> Sample:
    """Calls ``(args, kwargs)`` that an op takes, from its schema.

    Tensors have sizes that fit, first all one shape, and any values. Other arguments are those that
    :func:`shardwise.testing.samples_from_schema` tries. Raises :class:`ShardingError` for an op that refuses every
    guess.
    """
    overload = one_op(op, "draw samples")
    names, indices = draw(st.sampled_from(_patterns(overload)))
    # An index is 0 or 1, and what it points into has that many.
    size = st.integers(2, 9) if indices else sizes()
    # All sizes for every pattern: with fewer choices a later pattern would be simpler than the first.
    drawn = {name: draw(size) for name in SIZE_NAMES}
    calls = calls_of(overload, (names, indices), drawn)
    assume(calls)
    return redrawn(draw(st.sampled_from(calls)), draw(st.integers(0, 1 << 16)))


@cache
def _patterns(op: Op) -> list[Pattern]:
    patterns = patterns_of(op)
    if not patterns:
        raise ShardingError(
            asked=f"draw samples of {op_name(op)}",
            found="it takes none of the calls that its schema suggests",
            do="Write a strategy of its own: hypothesis.strategies.builds over shapes().",
            op=op_name(op),
        )
    return patterns
