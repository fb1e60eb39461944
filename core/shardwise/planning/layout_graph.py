"""The graph of layouts: which steps lead from one layout of a tensor to another, and what each costs.

A layout is a tuple of codes, one per mesh dim: 0 is ``R``, ``d + 1`` is ``S(d)``, ``-1 - k`` is a ``Partial`` of the
``k``-th reduction. So [S(1), R] is (2, 0), and [P(sum), S(0)] is (-1, 1). A mesh dim of one rank splits nothing: its
code is 0 in this graph, whatever its placement.

The graph depends on the mesh and the tensor alone, never on where a search starts or ends. So distances in it obey the
triangle inequality. Only ``fills``, the steps that make a mesh dim partial, depend on the goal: those that cannot be
part of a cheapest path are left out.

Two laws say which steps are legal. Mesh dims split a tensor dim from left to right: so only the right-most mesh dims of
a tensor dim can be gathered or exchanged, and a new shard must be right of those that the tensor dim has. Partial mesh
dims are reduced from the last to the first: so a reduction waits for a later one that it does not commute with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain, combinations, islice, product

import torch

from shardwise.kernel.placements import REPLICATE, Partial, Placement, Shard, StridedShard, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS, commute, is_native, reducible
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, memory_order
from shardwise.planning.cost import JUST_UNDER, Links, StepCosts, step_costs

__all__ = ["Codes", "Edge", "LayoutGraph", "decode", "encode", "graph_of", "reduction_of", "searching"]

Codes = tuple[int, ...]
Dims = tuple[int, ...]
#: Cost in seconds, the layout that the step leads to, its kind, the mesh dims of its group, the bytes of a rank.
Edge = tuple[float, Codes, str, Dims, int]
#: Kind, the layout after the step, its mesh dims, the layout in which these mesh dims are whole.
LegalStep = tuple[str, Codes, Dims, Codes]
_MAX_PATHS = 64  # per graph
_MAX_LAYOUTS = 4096  # per graph; about a kilobyte each


_KIND_CODES = {kind: -1 - k for k, kind in enumerate(REDUCE_OPS)}


def encode(placement: Placement) -> int:
    """The code of a placement; see the module."""
    # Types are compared, because isinstance of a placement runs Python code of torch.
    cls = type(placement)
    if cls is Shard:
        return int(placement.dim) + 1  # type: ignore[attr-defined]
    assert cls is not StridedShard, "strided shards are planned in their factors"
    return _KIND_CODES[placement.reduce_op] if cls is Partial else 0  # type: ignore[attr-defined]


def decode(code: int) -> Placement:
    """The placement of a code; see the module."""
    if code > 0:
        return shard(code - 1)
    return partial(reduction_of(code)) if code else REPLICATE


def reduction_of(code: int) -> str:
    """The reduction of a partial placement's code, which is below 0."""
    return REDUCE_OPS[-1 - code]


def _legal_steps(mesh_shape: Dims, ndim: int, dtype: torch.dtype, layout: Codes) -> Iterator[LegalStep]:
    """Every step out of a layout but the fills: its kind, the layout after it, its mesh dims, and the layout in which
    these mesh dims are whole.

    For a matrix that both mesh dims of a (2, 2) mesh shard by rows, so a layout of (1, 1)::

        all_gather  (1, 0)  mesh dim 1        all_to_all  (1, 2)  mesh dim 1
        all_gather  (0, 0)  mesh dims 0, 1    all_to_all  (2, 2)  mesh dims 0, 1

    Mesh dim 0 cannot be gathered alone: mesh dim 1 splits the pieces that mesh dim 0 makes.
    """
    sharders: list[list[int]] = [[] for _ in range(ndim)]  # per tensor dim, its mesh dims
    for m, code in enumerate(layout):
        if code > 0:
            sharders[code - 1].append(m)
    for m, n in enumerate(mesh_shape):
        if n > 1 and layout[m] == 0:
            for d, mesh_dims in enumerate(sharders):
                if not mesh_dims or mesh_dims[-1] < m:
                    yield "slice", _with(layout, (m,), d + 1), (m,), layout
    # One gather may be of the right-most mesh dims of several tensor dims. The first product is of none.
    suffixes = [[mesh_dims[i:] for i in range(len(mesh_dims), -1, -1)] for mesh_dims in sharders if mesh_dims]
    for parts in islice(product(*suffixes), 1, None):
        dims = tuple(sorted(chain.from_iterable(parts)))
        whole = _with(layout, dims, 0)
        yield "all_gather", whole, dims, whole
    for d, mesh_dims in enumerate(sharders):
        for dims in (tuple(mesh_dims[i:]) for i in range(len(mesh_dims))):
            whole = _with(layout, dims, 0)
            for e, others in enumerate(sharders):
                if e != d and not (others and others[-1] > dims[0]):
                    yield "all_to_all", _with(layout, dims, e + 1), dims, whole
    for dims in _reducible_groups(layout, dtype):
        whole = _with(layout, dims, 0)
        yield "all_reduce", whole, dims, whole
        for d, mesh_dims in enumerate(sharders):
            if not mesh_dims or mesh_dims[-1] < dims[0]:
                yield "reduce_scatter", _with(layout, dims, d + 1), dims, whole


def _reducible_groups(layout: Codes, dtype: torch.dtype) -> Iterator[Dims]:
    """The groups of mesh dims that one collective may reduce now.

    They have one reduction, which commutes with that of every later partial mesh dim.
    """
    ready: dict[str, list[int]] = {}
    later: set[str] = set()
    for m in reversed(range(len(layout))):
        if layout[m] < 0:
            kind = reduction_of(layout[m])
            if reducible(kind, dtype) and all(commute(kind, other, dtype) for other in later):
                ready.setdefault(kind, []).insert(0, m)
            later.add(kind)
    for mesh_dims in ready.values():
        for size in range(1, len(mesh_dims) + 1):
            yield from combinations(mesh_dims, size)


@lru_cache(maxsize=32)
def _steps_by_layout(_mesh_shape: Dims, _ndim: int, _dtype: torch.dtype) -> dict[Codes, tuple[LegalStep, ...]]:
    """The legal steps that were listed so far: one dict for all tensors with so many dims and this dtype."""
    return {}


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
        # Shared by the searches of one problem; see :func:`searching`.
        self._sizes: dict[Codes, Dims] = {}
        self._nbytes: dict[Codes, int] = {}
        self._edges: dict[Codes, list[Edge]] = {}
        figures = _mesh_figures(self.mesh_shape, costs)
        #: Ranks in all; the mesh dims of one rank; group size, start, latency and seconds per byte of each mesh dim
        #: alone; the least seconds per byte of all mesh dims.
        self.ranks, self.single, self.alone, self.fastest = figures
        #: The cheapest paths of earlier searches, by start and goal: cost and steps, ``None`` where there is no path.
        self.paths: dict[tuple[Codes, Codes], tuple[float, tuple[Edge, ...]] | None] = {}

    @cached_property
    def is_even(self) -> bool:
        """Whether all shards are even, whichever mesh dims split whichever tensor dim."""
        return all(n % self.ranks == 0 for n in self.shape)

    @cached_property
    def _steps(self) -> dict[Codes, tuple[LegalStep, ...]]:
        return _steps_by_layout(self.mesh_shape, len(self.shape), self.dtype)

    @cached_property
    def _outer(self) -> tuple[Dims, ...]:
        """Per tensor dim, the dims outside it in memory. Its shards are blocks of memory only if these are 1."""
        order = memory_order(self._meta)
        return tuple(order[: order.index(d)] for d in range(len(self.shape)))

    def settled(self, layout: Codes) -> Codes:
        """The layout with 0 on the mesh dims of one rank."""
        return tuple(0 if m in self.single else code for m, code in enumerate(layout))

    def remember(self, start: Codes, goal: Codes, path: tuple[float, tuple[Edge, ...]] | None) -> None:
        """Keep a path for later searches. When there are many, the earlier ones are dropped."""
        if len(self.paths) >= _MAX_PATHS:
            self.paths.clear()
        self.paths[start, goal] = path

    def sizes(self, layout: Codes) -> Dims:
        """The largest local shape. The rank at coordinate 0 of every mesh dim has it."""
        known = self._sizes.get(layout)
        if known is None:
            local = list(self.shape)
            for n, code in zip(self.mesh_shape, layout, strict=True):
                if code > 0:
                    local[code - 1] = -(-local[code - 1] // n)
            known = self._sizes[layout] = tuple(local)
        return known

    def nbytes(self, layout: Codes) -> int:
        """Bytes of the largest local tensor."""
        known = self._nbytes.get(layout)
        if known is None:
            known = self._nbytes[layout] = math.prod(self.sizes(layout)) * self.itemsize
        return known

    def edges(self, layout: Codes) -> list[Edge]:
        """Every step out of a layout but the fills, with its cost."""
        edges = self._edges.get(layout)
        if edges is not None:
            return edges
        steps = self._steps.get(layout)
        if steps is None:
            if len(self._steps) >= _MAX_LAYOUTS:
                self._steps.clear()
            steps = self._steps[layout] = tuple(_legal_steps(self.mesh_shape, len(self.shape), self.dtype, layout))
        edges = self._edges[layout] = []
        costs = self.costs
        for kind, after, dims, whole in steps:
            if kind == "slice":
                nbytes = self.nbytes(after)
                cost = costs.copy(nbytes)
            elif kind == "all_gather":
                nbytes = self.nbytes(layout)
                cost = costs.all_gather(dims, nbytes)
                if not self._one_block(layout, after, dims):
                    cost += costs.copy(self.nbytes(after))
            elif kind == "all_to_all":
                before, e = self.sizes(layout), after[dims[0]] - 1  # a piece is cut out of dim e
                nbytes = self.sizes(after)[e] * self.itemsize * math.prod(before[:e]) * math.prod(before[e + 1 :])
                cost = costs.all_to_all(dims, nbytes)
                if not self._one_block(after, whole, dims):
                    cost += costs.copy(self.nbytes(layout))
                if not self._one_block(layout, whole, dims):
                    cost += costs.copy(self.nbytes(after))
            elif kind == "all_reduce":
                nbytes = self.nbytes(layout)
                native = is_native(reduction_of(layout[dims[0]]), self.dtype)
                cost = (costs.all_reduce if native else costs.all_reduce_by_moving)(dims, nbytes)
            else:
                nbytes = self.nbytes(after)
                cost = costs.reduce_scatter(dims, nbytes)
                if not self._one_block(after, whole, dims):
                    cost += costs.copy(self.nbytes(layout))
            edges.append((cost, after, kind, dims, nbytes))
        return edges

    def keep_paths_only(self) -> None:
        """Drop sizes and edges; see :func:`searching`."""
        self._sizes.clear()
        self._nbytes.clear()
        self._edges.clear()

    def fills(self, layout: Codes, target: Codes) -> Iterator[Edge]:
        """The local steps that make a mesh dim partial: as it is in ``target``, or as mesh dims on both its sides are.

        Between two sums of [P(sum), R, P(sum)], for example, the middle one may become a sum: one all-reduce over all
        three mesh dims then costs less than two.

        To fill a whole tensor costs its copy. To fill a shard costs as much as to gather it first, because
        a partial shard still has to be gathered later. So no reduction becomes cheaper by taking in a shard.
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
                        whole = _with(layout, (m,), 0)
                        gather = self.costs.all_gather((m,), self.nbytes(layout))
                        if not self._one_block(layout, whole, (m,)):
                            gather += self.costs.copy(self.nbytes(whole))
                        cost = (cost + gather) * JUST_UNDER  # it wins over a gather and a fill
                    yield cost, after, "fill", (m,), nbytes

    def _may_fill(self, layout: Codes, m: int, kind: str) -> bool:
        """Whether a mesh dim may become partial by this reduction without a wrong result later."""
        rest = layout[m + 1 :]
        later = {reduction_of(code) for code in rest if code < 0}
        if not reducible(kind, self.dtype):
            return False
        if layout[m] == 0:
            # A later sum would add the ones that fill a product. Zeros and copies are safe under every reduction.
            return kind != "product" or "sum" not in later
        # The neutral values of max and min are extremes, which overflow or turn to NaN in the arithmetic that a
        # partial tensor may still go through.
        # A shard in an average is multiplied by the number of ranks, for which integers have no room.
        has_room = kind != "avg" or self.dtype.is_floating_point or self.dtype.is_complex
        embeds = kind not in ("max", "min") and has_room
        return embeds and layout[m] not in rest and all(commute(kind, other, self.dtype) for other in later)

    def _one_block(self, sharded: Codes, whole: Codes, dims: Dims) -> bool:
        """Whether the shards over ``dims`` follow each other in the memory of the whole."""
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
    """A context in which graphs are searched. Afterwards they keep the paths and drop the sizes and edges of layouts.

    Sizes and edges are quickly computed again, and there are as many graphs as shapes of tensors.
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


@lru_cache(maxsize=256)
def _cached_graph(mesh_shape: Dims, links: Links, meta: TensorMeta) -> LayoutGraph:
    return LayoutGraph(mesh_shape, step_costs(mesh_shape, links), meta)


def graph_of(spec: TensorSpec, links: Links) -> LayoutGraph:
    """The graph for the spec's mesh and tensor meta, with costs by these links."""
    return _cached_graph(spec.mesh_shape, links, spec.tensor_meta)
