"""Paths: the cheapest sequence of steps from one layout of a tensor to another.

Planning alone: no process group, and the same path on every rank. ``path_search`` searches it.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen

from shardwise.errors import LayoutError, MeshMismatchError
from shardwise.kernel.factors import Factors, flat_placements, refined
from shardwise.kernel.placements import REPLICATE, Partial, Placement, shard_dim, show_all
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.bounds import Bounds
from shardwise.planning.cost import links_of
from shardwise.planning.layout_graph import decode, encode, graph_of, searching
from shardwise.planning.path_search import Search

__all__ = ["Leg", "Path", "Step", "bound", "legs", "path_cost", "shortest_path"]


@frozen
class Step:
    """One change of layout, on one or several mesh dims at once.

    ``kind`` is ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``slice``, ``fill`` or ``relabel``
    (other placements on mesh dims of one rank). ``source`` and ``target`` are the placements before and after it.
    ``nbytes`` are the bytes that the cost counts: a rank's shard for a gather, its part of the result for a
    reduce-scatter, its tensor for an all-reduce, one of its pieces for an all-to-all, the result for local steps.
    ``held`` are the bytes of the largest local tensor before the step. ``cost`` is in seconds.
    """

    kind: str
    mesh_dims: tuple[int, ...]
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    nbytes: int
    held: int
    cost: float

    @property
    def tensor_dims(self) -> tuple[int, ...]:
        """The tensor dims that the step gathers, scatters or exchanges, ascending."""
        placements = [p for m in self.mesh_dims for p in (self.source[m], self.target[m])]
        return tuple(sorted({d for p in placements if (d := shard_dim(p)) is not None}))

    @property
    def reduction(self) -> str | None:
        """The reduction of the partial placements before or after the step, if any."""
        placements = [p for m in self.mesh_dims for p in (self.source[m], self.target[m])]
        return next((p.reduce_op for p in placements if isinstance(p, Partial)), None)

    def __str__(self) -> str:
        return f"{self.kind}{list(self.mesh_dims)} {show_all(self.source)} -> {show_all(self.target)}"


@frozen
class Path:
    """The steps from one layout to another, and their cost in seconds."""

    steps: tuple[Step, ...]
    cost: float

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps)) or "nothing to do"


@frozen
class Leg:
    """A part of a path on which plain shards are redistributed, of the tensor whose dims are ``factors``."""

    src: TensorSpec
    dst: TensorSpec
    factors: Factors


def legs(src: TensorSpec, dst: TensorSpec) -> list[Leg]:
    """The parts of a path between layouts of which one has strided shards: one, or two.

    There are two where the pieces of a dim in ``src`` cross those in ``dst``. Between them the dim is whole.
    """
    factors = refined(src.factors, dst.factors)
    if factors is not None:
        start, end = src.in_factors(factors), dst.in_factors(factors)
        if start is not None and end is not None:
            return [Leg(start, end, factors)]
    changed = {d for d, (a, b) in enumerate(zip(src.factors, dst.factors, strict=True)) if a != b}
    between = src.with_placements([REPLICATE if shard_dim(p) in changed else p for p in src.placements])
    return [leg for pair in ((src, between), (between, dst)) for leg in legs(*pair)]


def shortest_path(src: TensorSpec, dst: TensorSpec) -> Path:
    """The cheapest steps from ``src`` to ``dst``: a reduce-scatter for P(sum) to S(0), for example.

    Both must have one mesh, shape and dtype. Raises :class:`MeshMismatchError` for two meshes, and :class:`LayoutError`
    for two shapes or dtypes, or when the dtype lacks a reduction that is needed (avg of bools, max and min of complex
    numbers).
    """
    if src.is_strided or dst.is_strided:
        _check(src, dst)
        parts = [(leg, shortest_path(leg.src, leg.dst)) for leg in legs(src, dst)]
        steps = [_flat(step, leg.factors, src.mesh_shape) for leg, path in parts for step in path.steps]
        return Path(tuple(steps), sum(path.cost for _, path in parts))
    search = _search(src, dst)
    if search.steps is None:
        kinds = sorted({*src.reductions.values(), *dst.reductions.values()})
        raise LayoutError(
            asked=f"redistribute {src} to {show_all(dst.placements)}",
            found=f"{src.dtype} cannot be reduced by {', '.join(kinds)}",
            do="Cast the tensor first, or keep the placements that it has.",
            src=src,
            dst=dst,
        )
    # A mesh dim of one rank changes its placement without moving data.
    relabelled = tuple(m for m, n in enumerate(src.mesh_shape) if n == 1 and src.placements[m] != dst.placements[m])
    steps = []
    before = src.placements
    if relabelled:
        before = tuple(dst.placements[m] if m in relabelled else p for m, p in enumerate(src.placements))
        cost = len(relabelled) * search.graph.costs.copy(0)
        steps.append(Step("relabel", relabelled, src.placements, before, 0, 0, cost))
    for cost, codes, kind, dims, nbytes in search.steps:
        after = tuple(decode(codes[m]) if m in dims else p for m, p in enumerate(before))
        held = search.graph.nbytes(search.graph.settled(tuple(map(encode, before))))
        steps.append(Step(kind, dims, before, after, nbytes, held, cost))
        before = after
    return Path(tuple(steps), search.lower)


def _flat(step: Step, factors: Factors, mesh_shape: tuple[int, ...]) -> Step:
    """A step of the tensor whose dims are factors, as one of the tensor itself."""
    source, target = (flat_placements(p, mesh_shape, factors) for p in (step.source, step.target))
    return evolve(step, source=source, target=target)


def path_cost(src: TensorSpec, dst: TensorSpec) -> float:
    """The cost of :func:`shortest_path` in seconds: 0 for the same placements, infinite when there is no path."""
    if src is dst:
        return 0.0
    if src.is_strided or dst.is_strided:
        _check(src, dst)
        return sum(path_cost(leg.src, leg.dst) for leg in legs(src, dst))
    return _search(src, dst).lower


def _search(src: TensorSpec, dst: TensorSpec) -> Search:
    """The finished search for the cheapest steps from ``src`` to ``dst``."""
    _check(src, dst)
    graph = graph_of(src, links_of(src.mesh))
    search = Search(graph, tuple(map(encode, src.placements)), tuple(map(encode, dst.placements)))
    with searching(graph):
        search.advance(math.inf)
    return search


def _check(src: TensorSpec, dst: TensorSpec) -> None:
    if src.mesh != dst.mesh:
        raise MeshMismatchError(
            asked=f"redistribute {src}",
            found=f"the target {dst} lies on another mesh",
            do="Redistribute within one mesh; to change meshes, take the full tensor and distribute it anew.",
            meshes=(repr(src.mesh), repr(dst.mesh)),
        )
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise LayoutError(
            asked=f"redistribute {src}",
            found=f"the target is {dst}, of another shape or dtype",
            do="Redistribution changes placements only; reshape or cast before it or after it.",
            src=src,
            dst=dst,
        )


# -- a bound without a search ----------------------------------------------------------------------------------------


def bound(src: TensorSpec, mesh_dim: int, target: Placement) -> float:
    """A lower bound, in seconds, on the cost of any path that gives one mesh dim the placement ``target``.

    It is 0 when the mesh dim has that placement. Summed over the mesh dims, bounds never exceed the path's cost.
    """
    source = tuple(map(encode, src.placements))
    return sum(Bounds(graph_of(src, links_of(src.mesh)), source).step(mesh_dim, encode(target)))
