"""The graph of layouts: which single steps lead from one layout of a tensor to another, and what each costs.

A layout is a tuple of codes, one per mesh dim: 0 is ``R``, ``d + 1`` is ``S(d)``, ``-1 - k`` is a ``Partial`` of the
``k``-th reduction. A mesh dim of one rank places nothing: its code is 0 here, whatever its placement.

The graph of layouts and steps depends on the mesh and the tensor alone, never on where a search starts or ends, so
distances in it obey the triangle inequality. Only ``fills``, which make a mesh dim partial, leave out what never pays.

Legal steps follow from the two laws of ``shards``. Mesh dims split a tensor dim from left to right, so only the
right-most mesh dims of a tensor dim can be gathered or exchanged, and a shard is only added right of those that are
there. Reductions are reduced from the last mesh dim to the first, so a kind waits for later mesh dims whose kind it
does not commute with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import combinations, product

import torch

from shardwise.kernel.placements import REPLICATE, Partial, Placement, Shard, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS, commute, is_native, reducible
from shardwise.kernel.spec import TensorMeta, TensorSpec, memory_order
from shardwise.planning.cost import JUST_UNDER, Links, StepCosts, step_costs

__all__ = ["Edge", "Codes", "LayoutGraph", "decode", "encode", "graph_of", "reduction_of", "searching"]

Codes = tuple[int, ...]
Dims = tuple[int, ...]
#: Cost in seconds, the layout that the step leads to, its kind, the mesh dims of its group, the bytes of a rank.
Edge = tuple[float, Codes, str, Dims, int]
_GraphStep = tuple[str, Codes, Dims, Codes]
_MAX_PATHS = 64  # per graph
_MAX_LAYOUTS = 4096  # per graph; about a kilobyte each


_KIND_CODES = {kind: -1 - k for k, kind in enumerate(REDUCE_OPS)}


def encode(placement: Placement) -> int:
    """The code of a placement; see the module."""
    # Comparing types: isinstance of a placement runs Python code of torch's.
    of = type(placement)
    if of is Shard:
        return int(placement.dim) + 1  # type: ignore[attr-defined]
    return _KIND_CODES[placement.reduce_op] if of is Partial else 0  # type: ignore[attr-defined]


def decode(code: int) -> Placement:
    """The inverse of :func:`encode`."""
    if code > 0:
        return shard(code - 1)
    return partial(reduction_of(code)) if code else REPLICATE


def reduction_of(code: int) -> str:
    """The reduction of a partial placement's code, which is below 0."""
    return REDUCE_OPS[-1 - code]


class LegalSteps:
    """Which steps lead out of each layout of tensors with so many dims and such a dtype; what they cost is not here.

    A step is its kind, the layout that it leads to, its mesh dims, and the layout in which those mesh dims are whole.
    """

    def __init__(self, mesh_shape: Dims, ndim: int, dtype: torch.dtype) -> None:
        self._split = tuple(m for m, n in enumerate(mesh_shape) if n > 1)
        self._ndim = ndim
        self._dtype = dtype
        self._steps: dict[Codes, tuple[_GraphStep, ...]] = {}

    def steps(self, layout: Codes) -> tuple[_GraphStep, ...]:
        """Every step out of a layout but the fills."""
        known = self._steps.get(layout)
        if known is None:
            if len(self._steps) >= _MAX_LAYOUTS:
                self._steps.clear()
            sharders: list[list[int]] = [[] for _ in range(self._ndim)]
            for m, code in enumerate(layout):
                if code > 0:
                    sharders[code - 1].append(m)
            known = self._steps[layout] = (
                *self._slices(layout, sharders),
                *self._gathers(layout, sharders),
                *self._exchanges(layout, sharders),
                *self._reductions(layout, sharders),
            )
        return known

    def _slices(self, layout: Codes, sharders: list[list[int]]) -> Iterator[_GraphStep]:
        for m in self._split:
            if layout[m] == 0:
                for d, there in enumerate(sharders):
                    if not there or there[-1] < m:
                        yield "slice", _with(layout, (m,), d + 1), (m,), layout

    def _gathers(self, layout: Codes, sharders: list[list[int]]) -> Iterator[_GraphStep]:
        # Any right-most mesh dims of any tensor dims may go together: only like kinds share a collective.
        suffixes = [[there[i:] for i in range(len(there), -1, -1)] for there in sharders if there]
        for chosen in product(*suffixes):
            dims = tuple(sorted(m for suffix in chosen for m in suffix))
            if dims:
                after = _with(layout, dims, 0)
                yield "all_gather", after, dims, after

    def _exchanges(self, layout: Codes, sharders: list[list[int]]) -> Iterator[_GraphStep]:
        for d, there in enumerate(sharders):
            for first in range(len(there)):
                dims = tuple(there[first:])
                whole = _with(layout, dims, 0)
                for e, others in enumerate(sharders):
                    if e != d and not (others and others[-1] > dims[0]):
                        yield "all_to_all", _with(layout, dims, e + 1), dims, whole

    def _reductions(self, layout: Codes, sharders: list[list[int]]) -> Iterator[_GraphStep]:
        waiting: dict[str, list[int]] = {}
        later: set[str] = set()
        for m in reversed(range(len(layout))):
            if layout[m] < 0:
                kind = reduction_of(layout[m])
                if reducible(kind, self._dtype) and all(commute(kind, other, self._dtype) for other in later):
                    waiting.setdefault(kind, []).insert(0, m)
                later.add(kind)
        for ready in waiting.values():
            for dims in _subsets(ready):
                whole = _with(layout, dims, 0)
                yield "all_reduce", whole, dims, whole
                for d, there in enumerate(sharders):
                    if not there or there[-1] < dims[0]:
                        yield "reduce_scatter", _with(layout, dims, d + 1), dims, whole


@lru_cache(maxsize=32)
def _legal_steps(mesh_shape: Dims, ndim: int, dtype: torch.dtype) -> LegalSteps:
    return LegalSteps(mesh_shape, ndim, dtype)


@lru_cache(maxsize=64)
def _mesh_figures(
    mesh_shape: Dims, costs: StepCosts
) -> tuple[int, Dims, tuple[tuple[int, float, float, float], ...], float]:
    alone = tuple(costs.alone(m) for m in range(len(mesh_shape)))
    single = tuple(m for m, n in enumerate(mesh_shape) if n == 1)
    return math.prod(mesh_shape), single, alone, min((figures[3] for figures in alone), default=0.0)


class LayoutGraph:
    """The legal steps of one kind of tensor on one mesh; ``edges`` and ``fills`` are the graph."""

    def __init__(self, mesh_shape: Sequence[int], costs: StepCosts, meta: TensorMeta) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.costs = costs
        self.shape = tuple(meta.shape)
        self.dtype = meta.dtype
        self.itemsize = meta.dtype.itemsize
        self.numel = math.prod(self.shape)
        self._meta = meta
        # What the searches of one problem share; see :func:`searching`.
        self._sizes: dict[Codes, Dims] = {}
        self._nbytes: dict[Codes, int] = {}
        self._edges: dict[Codes, list[Edge]] = {}
        figures = _mesh_figures(self.mesh_shape, costs)
        #: Ranks in all; the mesh dims of one rank; group size, start, latency and seconds per byte of each mesh dim
        #: alone; the least seconds per byte of all.
        self.ranks, self.single, self.alone, self.fastest = figures
        #: What searches found: the cost of a path and its steps, ``None`` where there is none.
        self.found: dict[tuple[Codes, Codes], tuple[float, tuple[Edge, ...]] | None] = {}

    @cached_property
    def is_even(self) -> bool:
        """Whether shards are even however the mesh splits the tensor."""
        return all(n % self.ranks == 0 for n in self.shape)

    @cached_property
    def _legal(self) -> LegalSteps:
        return _legal_steps(self.mesh_shape, len(self.shape), self.dtype)

    @cached_property
    def _outer(self) -> tuple[Dims, ...]:
        """Per tensor dim, the dims that lie outside it in memory: a shard of a dim is one block only if they are 1."""
        order = memory_order(self._meta)
        return tuple(order[: order.index(d)] for d in range(len(self.shape)))

    def settled(self, layout: Codes) -> Codes:
        """The layout with 0 on the mesh dims of one rank."""
        return tuple(0 if m in self.single else code for m, code in enumerate(layout))

    def remember(self, start: Codes, goal: Codes, path: tuple[float, tuple[Edge, ...]] | None) -> None:
        """Keep a path; all are dropped when there are many."""
        if len(self.found) >= _MAX_PATHS:
            self.found.clear()
        self.found[start, goal] = path

    def sizes(self, layout: Codes) -> Dims:
        """The largest local shape: that of the rank at coordinate 0 of every mesh dim."""
        known = self._sizes.get(layout)
        if known is None:
            found = list(self.shape)
            for n, code in zip(self.mesh_shape, layout, strict=True):
                if code > 0:
                    found[code - 1] = -(-found[code - 1] // n)
            known = self._sizes[layout] = tuple(found)
        return known

    def nbytes(self, layout: Codes) -> int:
        """Bytes of the largest local tensor."""
        known = self._nbytes.get(layout)
        if known is None:
            known = self._nbytes[layout] = math.prod(self.sizes(layout)) * self.itemsize
        return known

    def edges(self, layout: Codes) -> list[Edge]:
        """Every step out of a layout but the fills."""
        known = self._edges.get(layout)
        if known is None:
            known = self._edges[layout] = list(self._costed(layout))
        return known

    def keep_paths_only(self) -> None:
        """Drop sizes and edges; see :func:`searching`."""
        self._sizes.clear()
        self._nbytes.clear()
        self._edges.clear()

    def _costed(self, layout: Codes) -> Iterator[Edge]:
        costs = self.costs
        for kind, after, dims, whole in self._legal.steps(layout):
            if kind == "slice":
                nbytes = self.nbytes(after)
                cost = costs.copy(nbytes)
            elif kind == "all_gather":
                nbytes = self.nbytes(layout)
                cost = costs.all_gather(dims, nbytes)
                if not self._one_block(layout, after, dims):
                    cost += costs.copy(self.nbytes(after))
            elif kind == "all_to_all":
                cost, nbytes = self._exchange(layout, after, dims, whole)
            elif kind == "all_reduce":
                nbytes = self.nbytes(layout)
                native = is_native(reduction_of(layout[dims[0]]), self.dtype)
                cost = (costs.all_reduce if native else costs.all_reduce_by_moving)(dims, nbytes)
            else:
                nbytes = self.nbytes(after)
                cost = costs.reduce_scatter(dims, nbytes)
                if not self._one_block(after, whole, dims):
                    cost += costs.copy(self.nbytes(layout))
            yield cost, after, kind, dims, nbytes

    def _exchange(self, layout: Codes, after: Codes, dims: Dims, whole: Codes) -> tuple[float, int]:
        """Cost and bytes of a piece of an all-to-all."""
        before, e = self.sizes(layout), after[dims[0]] - 1
        piece = self.sizes(after)[e] * self.itemsize * math.prod(before[:e]) * math.prod(before[e + 1 :])
        cost = self.costs.all_to_all(dims, piece)
        if not self._one_block(after, whole, dims):
            cost += self.costs.copy(self.nbytes(layout))
        if not self._one_block(layout, whole, dims):
            cost += self.costs.copy(self.nbytes(after))
        return cost, piece

    def fills(self, layout: Codes, target: Codes) -> Iterator[Edge]:
        """The local steps that make a mesh dim partial, as ``target`` has it, or to join a reduction to both its sides.

        A whole tensor costs its copy. A shard costs as much as if it were gathered first: that is what becoming partial
        puts off, and so no reduction is cheaper for having made a shard part of it.
        """
        partials = [code for code in layout if code < 0]
        if len(partials) == len(set(partials)) and min(target, default=0) >= 0:
            return
        for m, here in enumerate(layout):
            if here < 0 or self.mesh_shape[m] == 1:
                continue
            joined = {code for code in layout[:m] if code < 0 and code in layout[m + 1 :]}
            for code in sorted(joined | {target[m]}):
                if code < 0 and self._may_fill(layout, m, reduction_of(code)):
                    after = _with(layout, (m,), code)
                    nbytes = self.nbytes(after)
                    cost = self.costs.copy(nbytes)
                    if here > 0:
                        cost = (cost + self._gather_cost(layout, m)) * JUST_UNDER  # it wins over a gather and a fill
                    yield cost, after, "fill", (m,), nbytes

    def _may_fill(self, layout: Codes, m: int, kind: str) -> bool:
        rest = layout[m + 1 :]
        later = {reduction_of(code) for code in rest if code < 0}
        if layout[m] == 0:
            # Ranks that hold ones would add up; zeros, and the same value everywhere, are safe under every kind.
            return kind != "product" or "sum" not in later
        # The neutral values of max and min are extremes, which overflow or turn to NaN in the arithmetic that a
        # partial tensor may still go through.
        embeds = kind not in ("max", "min") and reducible(kind, self.dtype)
        return embeds and layout[m] not in rest and all(commute(kind, other, self.dtype) for other in later)

    def _gather_cost(self, layout: Codes, m: int) -> float:
        whole = _with(layout, (m,), 0)
        cost = self.costs.all_gather((m,), self.nbytes(layout))
        return cost if self._one_block(layout, whole, (m,)) else cost + self.costs.copy(self.nbytes(whole))

    def _one_block(self, sharded: Codes, whole: Codes, dims: Dims) -> bool:
        """Whether the shards over ``dims`` lie one behind the other in the whole's memory."""
        d = sharded[dims[0]] - 1
        small = self.sizes(sharded)
        for o in self._outer[d]:
            if small[o] != 1:
                return False
        pieces = 1
        for m in dims:
            if sharded[m] != d + 1:
                return False
            pieces *= self.mesh_shape[m]
        return small[d] * pieces == self.sizes(whole)[d]


@contextmanager
def searching(*graphs: LayoutGraph) -> Iterator[None]:
    """Search graphs in the block; afterwards they keep only the paths that were found.

    The sizes and edges of layouts are quickly computed again, and there are many kinds of tensor.
    """
    try:
        yield
    finally:
        for graph in graphs:
            graph.keep_paths_only()


def _with(layout: Codes, dims: Iterable[int], code: int) -> Codes:
    changed = list(layout)
    for m in dims:
        changed[m] = code
    return tuple(changed)


def _subsets(items: Sequence[int]) -> Iterator[Dims]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)


@lru_cache(maxsize=256)
def _cached_graph(mesh_shape: Dims, links: Links, meta: TensorMeta) -> LayoutGraph:
    return LayoutGraph(mesh_shape, step_costs(mesh_shape, links), meta)


def graph_of(spec: TensorSpec, links: Links) -> LayoutGraph:
    """The graph for tensors like the spec's on its mesh, with costs by these links."""
    return _cached_graph(spec.mesh_shape, links, spec.tensor_meta)
