"""Transitions: the cheapest sequence of steps from one layout of a tensor to another, step by step.

Pure planning: no process group, and the same answer on every rank. ``path_search`` finds the way.
"""

from __future__ import annotations

import math

from attrs import frozen

from shardwise.errors import LayoutError, MeshMismatchError
from shardwise.kernel.placements import Partial, Placement, Shard, show_all
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.bounds import Bounds
from shardwise.planning.cost import links_of
from shardwise.planning.layout_graph import decode, encode, graph_of, searching
from shardwise.planning.path_search import Search

__all__ = ["Step", "Path", "bound", "shortest_path", "path_cost"]


@frozen
class Step:
    """One change of layout, on one or several mesh dims at once.

    ``kind`` is ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``slice``, ``fill`` or ``relabel``
    (other placements on mesh dims of one rank). ``source`` and ``target`` are the placements before and after it.
    ``nbytes`` is what the cost counts: a rank's shard for a gather, its part of the result for a reduce-scatter, its
    tensor for an all-reduce, one of its pieces for an all-to-all, the result for local steps. ``cost`` is in seconds.
    """

    kind: str
    mesh_dims: tuple[int, ...]
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    nbytes: int
    cost: float

    @property
    def tensor_dims(self) -> tuple[int, ...]:
        """The tensor dims that the step gathers, scatters or exchanges, ascending."""
        placements = [p for m in self.mesh_dims for p in (self.source[m], self.target[m])]
        return tuple(sorted({p.dim for p in placements if isinstance(p, Shard)}))

    @property
    def reduction(self) -> str | None:
        """The reduction that the step reduces or makes."""
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


def shortest_path(src: TensorSpec, dst: TensorSpec) -> Path:
    """The cheapest steps from ``src`` to ``dst``, which must share mesh, shape and dtype.

    Raises :class:`MeshMismatchError` or :class:`LayoutError` when they do not, and :class:`LayoutError` when the dtype
    lacks a reduction that is needed (avg of bools, max and min of complex numbers).
    """
    search = _search(src, dst)
    if search.steps is None:
        kinds = sorted({*src.reductions.values(), *dst.reductions.values()})
        raise LayoutError(
            asked=f"redistribute {src} to {show_all(dst.placements)}",
            found=f"{src.dtype} cannot be reduced by {', '.join(kinds)}",
            do="Cast the tensor first, or keep its partial placements.",
            src=src,
            dst=dst,
        )
    # The placements of mesh dims of one rank change freely, the data stays.
    renamed = tuple(m for m, n in enumerate(src.mesh_shape) if n == 1 and src.placements[m] != dst.placements[m])
    steps = []
    at = src.placements
    if renamed:
        at = tuple(dst.placements[m] if m in renamed else p for m, p in enumerate(src.placements))
        cost = len(renamed) * search.graph.costs.copy(0)
        steps.append(Step("relabel", renamed, src.placements, at, 0, cost))
    for cost, after, kind, dims, nbytes in search.steps:
        changed = list(at)
        for m in dims:
            changed[m] = decode(after[m])
        target = tuple(changed)
        steps.append(Step(kind, dims, at, target, nbytes, cost))
        at = target
    return Path(tuple(steps), search.lower)


def path_cost(src: TensorSpec, dst: TensorSpec) -> float:
    """The cost of :func:`shortest_path` in seconds: 0 for the same placements, infinite when there is no path."""
    return 0.0 if src is dst else _search(src, dst).lower


def _search(src: TensorSpec, dst: TensorSpec) -> Search:
    """The finished search for the cheapest steps from ``src`` to ``dst``."""
    _check_pair(src, dst)
    graph = graph_of(src, links_of(src.mesh))
    search = Search(graph, tuple(map(encode, src.placements)), tuple(map(encode, dst.placements)))
    with searching(graph):
        search.advance(math.inf)
    return search


def _check_pair(src: TensorSpec, dst: TensorSpec) -> None:
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
    """The least that a transition costs which gives one mesh dim the placement ``target``; 0 when it has it already.

    Summed over the mesh dims, bounds never exceed the transition's cost.
    """
    source = tuple(map(encode, src.placements))
    return sum(Bounds(graph_of(src, links_of(src.mesh)), source).step(mesh_dim, encode(target)))
