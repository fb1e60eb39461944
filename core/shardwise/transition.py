"""Transitions: the cheapest sequence of steps from one layout of a tensor to another.

Pure planning: no process group, and the same answer on every rank. The search is A* over layouts; its estimate never
exceeds the true cost, so costs are distances: not negative, zero only between equal layouts, and never more than a
detour. Among equally cheap ways the one found first wins; the order of the search depends on layouts and figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from attrs import frozen

from shardwise.cost import Links, links_of
from shardwise.errors import LayoutError, MeshMismatchError
from shardwise.moves import Edge, Layout, Moves, decode, encode, moves_of
from shardwise.placements import Partial, Placement, Replicate, Shard, show_all
from shardwise.spec import TensorSpec

__all__ = ["Step", "Transition", "bound", "transition", "transition_cost"]


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
    def pending(self) -> str | None:
        """The pending kind that the step reduces or makes."""
        placements = [p for m in self.mesh_dims for p in (self.source[m], self.target[m])]
        return next((p.reduce_op for p in placements if isinstance(p, Partial)), None)

    def __str__(self) -> str:
        return f"{self.kind}{list(self.mesh_dims)} {show_all(self.source)} -> {show_all(self.target)}"


@frozen
class Transition:
    """The steps from one layout to another, and their cost in seconds."""

    steps: tuple[Step, ...]
    cost: float

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps)) or "nothing to do"


def transition(src: TensorSpec, dst: TensorSpec) -> Transition:
    """The cheapest steps from ``src`` to ``dst``, which must share mesh, shape and dtype.

    Raises :class:`MeshMismatchError` or :class:`LayoutError` when they do not, and :class:`LayoutError` when a pending
    kind would have to be reduced that the dtype lacks (avg of bools, max and min of complex numbers).
    """
    found = _transition(src, dst, links_of(src.mesh))
    if found is None:
        kinds = sorted({*src.pending.values(), *dst.pending.values()})
        raise LayoutError(
            asked=f"redistribute {src} to {show_all(dst.placements)}",
            found=f"{src.dtype} cannot be reduced by {', '.join(kinds)}",
            do="Cast the tensor first, or keep its pending placements.",
            src=src,
            dst=dst,
        )
    return found


def transition_cost(src: TensorSpec, dst: TensorSpec) -> float:
    """The cost of :func:`transition` in seconds, 0 when the specs place alike, infinite when there is no way."""
    if src is dst:
        return 0.0
    found = _transition(src, dst, links_of(src.mesh))
    return math.inf if found is None else found.cost


@lru_cache(maxsize=8192)
def _transition(src: TensorSpec, dst: TensorSpec, links: Links) -> Transition | None:
    _check_pair(src, dst)
    start, goal = tuple(map(encode, src.placements)), tuple(map(encode, dst.placements))
    if start == goal:
        return Transition((), 0.0)
    moves = moves_of(src, links)
    alone = [m for m, n in enumerate(src.mesh_shape) if n == 1]
    steps = _relabel(src, dst, tuple(m for m in alone if start[m] != goal[m]), moves)
    edges = _search(moves, _zeroed(start, alone), _zeroed(goal, alone))
    if edges is None:
        return None
    fixed = {m: dst.placements[m] for m in alone}
    at = steps[-1].target if steps else src.placements
    for cost, after, kind, dims, nbytes in edges:
        target = tuple(fixed.get(m) or decode(code) for m, code in enumerate(after))
        steps.append(Step(kind, dims, at, target, nbytes, cost))
        at = target
    return Transition(tuple(steps), sum(step.cost for step in steps))


def _relabel(src: TensorSpec, dst: TensorSpec, mesh_dims: tuple[int, ...], moves: Moves) -> list[Step]:
    """The step for mesh dims of one rank: their placements change freely, the data stays."""
    if not mesh_dims:
        return []
    target = tuple(dst.placements[m] if m in mesh_dims else p for m, p in enumerate(src.placements))
    return [Step("relabel", mesh_dims, src.placements, target, 0, len(mesh_dims) * moves.costs.copy(0))]


def _zeroed(layout: Layout, mesh_dims: Sequence[int]) -> Layout:
    return tuple(0 if m in mesh_dims else code for m, code in enumerate(layout))


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


# -- the search ------------------------------------------------------------------------------------------------------


def _search(moves: Moves, start: Layout, goal: Layout) -> list[Edge] | None:
    """The edges of the cheapest way, or None when there is none."""
    estimate = _Estimate(moves, goal)
    best = {start: 0.0}
    came: dict[Layout, tuple[Layout, Edge]] = {}
    heap = [(estimate(start), 0.0, start)]
    limit = math.inf
    while heap:
        _, so_far, layout = heappop(heap)
        if layout == goal:
            return _way(came, start, goal)
        if so_far > best[layout]:
            continue
        for edge in (*moves.edges(layout), *moves.fills(layout, goal)):
            after = edge[1]
            cost = so_far + edge[0]
            if cost >= best.get(after, limit):
                continue
            total = cost + estimate(after)
            if total >= limit:
                continue
            if after == goal:
                limit = total
            best[after] = cost
            came[after] = (layout, edge)
            heappush(heap, (total, cost, after))
    return None


def _way(came: dict[Layout, tuple[Layout, Edge]], start: Layout, goal: Layout) -> list[Edge]:
    edges = []
    layout = goal
    while layout != start:
        layout, edge = came[layout]
        edges.append(edge)
    return edges[::-1]


# Estimates stay this much under what they bound, so that rounding never lifts them over it.
_SAFETY = 1 - 1e-9


class _Estimate:
    """A lower bound on the cost from a layout to ``goal``.

    Each mesh dim that must communicate brings its latency. Reductions and gathers cannot share a start. In bytes, a
    rank must receive what it needs and lacks; of a pending tensor it lacks all, and an element that is reduced over n
    ranks takes n - 1 messages.
    """

    def __init__(self, moves: Moves, goal: Layout) -> None:
        self.goal = goal
        self._moves = moves
        self._alone = [moves.costs.alone(m) for m in range(len(goal))]
        self._local_start = moves.costs.links.local_start
        self._seconds_per_byte = min(a[3] for a in self._alone) * moves.itemsize
        self._sizes = moves.sizes(goal)
        self._needed = math.prod(self._sizes)
        self._smallest = moves.numel / math.prod(moves.mesh_shape)
        self._known: dict[Layout, float] = {goal: 0.0}

    def __call__(self, layout: Layout) -> float:
        known = self._known.get(layout)
        if known is None:
            known = self._known[layout] = self._compute(layout) * _SAFETY
        return known

    def _compute(self, layout: Layout) -> float:
        start_reduce = start_gather = latency = local = 0.0
        contributors = 1
        for here, there, (n, start, doubling, _) in zip(layout, self.goal, self._alone, strict=True):
            if here == there:
                continue
            if here < 0:
                contributors *= n
                latency += doubling if there else 2 * doubling
                start_reduce = max(start_reduce, start)
            elif here > 0:
                latency += doubling
                start_gather = max(start_gather, start)
            else:
                local += self._local_start
        received = self._received(layout, contributors) * self._seconds_per_byte
        return start_reduce + start_gather + latency + local + received

    def _received(self, layout: Layout, contributors: int) -> float:
        """The least number of elements that the rank at coordinate 0 must receive."""
        if contributors > 1:
            return self._needed + (contributors - 2) * self._smallest
        held = 1
        for size, wanted in zip(self._moves.sizes(layout), self._sizes, strict=True):
            held *= min(size, wanted)
        return self._needed - held


# -- a bound without a search ----------------------------------------------------------------------------------------


def bound(src: TensorSpec, mesh_dim: int, target: Placement) -> float:
    """The least that a transition costs which gives one mesh dim the placement ``target``; 0 when it has it already.

    Summed over the mesh dims, bounds never exceed the transition's cost. A collective over several mesh dims starts
    once, so each of those in ``src`` that could share it answers for its part of the start.
    """
    return _bound(src, mesh_dim, target, links_of(src.mesh))


@lru_cache(maxsize=16384)
def _bound(src: TensorSpec, mesh_dim: int, target: Placement, links: Links) -> float:
    here = src.placements[mesh_dim]
    if here == target:
        return 0.0
    costs = moves_of(src, links).costs
    if src.mesh_shape[mesh_dim] == 1:
        return costs.copy(0) * _SAFETY
    # However the other mesh dims lie on the way, a rank holds at least its part of an even split over the whole mesh.
    least = src.tensor_meta.nbytes / math.prod(src.mesh_shape)
    if isinstance(here, Replicate):
        return costs.copy(least) * _SAFETY
    n, start, latency, seconds_per_byte = costs.alone(mesh_dim)
    if isinstance(here, Shard):
        sharing = sum(isinstance(p, Shard) for p in src.placements)
        rounds, received = 1, (n - 1) / n * least / sharing if isinstance(target, Shard) else (n - 1) * least
    else:
        sharing = src.placements.count(here)
        rounds = 2 if isinstance(target, Replicate) else 1
        received = rounds * (n - 1) * least
    return (start / sharing + rounds * latency + received * seconds_per_byte) * _SAFETY
