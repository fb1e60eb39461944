"""A lower bound on the cost of a step: no plan can be cheaper.

On one mesh dim the exact solution is its own bound. On several, the joint costs are split into parts, one per mesh dim,
that together never exceed them; each mesh dim is then solved by itself, and the sum of the least costs is a bound.

What is split is one *factor* after the other: the work of a call, or a move of a tensor. Its parts are exact for a
given assignment, the reference: there they add up to the factor's cost. Elsewhere they are lowered until no combination
of them exceeds a cost that is known to be too low: the work by the bytes and operations of a rank, a move by what it
sends with all other mesh dims sharded. So the bound is close where few calls could gain from a change on several mesh
dims at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from shardwise.kernel.placements import REPLICATE, Placement, Shard, is_strided, shard_dim
from shardwise.planning.cost import links_of, step_costs
from shardwise.program.cheap_moves import KINDS, SAFE, CheapMoves, Floats, kind_of_move
from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.elimination import eliminate
from shardwise.program.errors import MissingSolverError, TableLimitError
from shardwise.program.relaxation import lower_bound
from shardwise.program.step_graph import Places
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_slices import placed
from shardwise.program.step_solution import MeshDimProblem

__all__ = ["WorkTable", "split", "step_bound"]

_REFERENCE, _NEVER = len(KINDS), len(KINDS) + 1
"""Kinds of moves beside those of CheapMoves: that of the reference, and one that must not be."""

WorkTable: TypeAlias = Callable[[int, Sequence[Sequence[int]]], Floats]

_MOST_ENTRIES = 3_000_000
"""Entries of the largest table of a mesh dim's exact solution; beyond it a linear program bounds it."""

_MOST_COMBINATIONS = 1_500
"""Combinations of rows of a call whose lowering sends: each is looked at."""


def step_bound(problem: StepProblem, reference: Assignment, work: WorkTable) -> int:
    """A lower bound on the cost of every assignment of a problem, in nanoseconds, at the price that it has.

    ``reference`` is a good assignment: the bound is the closer the better it is. ``work(place, rows)`` gives, for lists
    of rows by mesh dim, an array of nanoseconds by combination that is never more than what the call costs.
    """
    if problem.graph.mesh.ndim == 1:
        # What the mesh dim's own problem costs beside the others is all there is.
        return _least(MeshDimProblem(problem, reference, 0).cost_graph())
    return _SplitStep(problem, reference, work).bound()


def split(costs: Floats, at: tuple[int, ...]) -> list[Floats]:
    """Parts by dim of an array of costs: their sum is exact at ``at``, and nowhere more than the array."""
    ndim = costs.ndim
    legal = costs < FORBIDDEN
    costs = np.minimum(costs, costs[legal].max()) if legal.any() else np.zeros_like(costs)
    share = costs[at] / ndim
    parts = [costs[_line(at, m)] - share * (ndim - 1) for m in range(ndim)]
    # Whoever costs more than in the reference gives way, by how much more: nobody gets cheaper than there without need.
    gains = [np.maximum(part - share, 0.0) for part in parts]
    changed = [(np.arange(n) != at[m]).astype(np.float64) for m, n in enumerate(costs.shape)]
    total, count = _sum(gains), np.maximum(_sum(changed), 1.0)
    missing = np.minimum(costs - _sum(parts), 0.0)
    for m in range(ndim):
        by_gain = _along(gains[m], m, ndim) / np.where(total > 0, total, 1.0)
        by_count = _along(changed[m], m, ndim) / count
        parts[m] += (missing * np.where(total > 0, by_gain, by_count)).min(axis=_others(m, ndim))
    for m in range(ndim):  # what is left over may be given back
        parts[m] += (costs - _sum(parts)).min(axis=_others(m, ndim))
    return parts


def _line(at: tuple[int, ...], m: int) -> tuple[Any, ...]:
    """The index of all states of one dim beside those of a place."""
    return (*at[:m], slice(None), *at[m + 1 :])


def _others(m: int, ndim: int) -> tuple[int, ...]:
    return tuple(k for k in range(ndim) if k != m)


def _along(values: NDArray[Any], m: int, ndim: int) -> NDArray[Any]:
    return values.reshape([-1 if k == m else 1 for k in range(ndim)])


def _sum(parts: Sequence[Floats]) -> Floats:
    total: Floats = reduce(np.add.outer, parts)
    return total


# -- the parts of a step ---------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Side:
    """Where a tensor comes from, or goes to: a variable (None: it lies fixed), the placements of its states by mesh
    dim, and the layout in the reference.
    """

    variable: int | None
    states: tuple[tuple[Placement, ...], ...]
    at: Places

    @classmethod
    def fixed(cls, layout: Places) -> _Side:
        return cls(None, tuple((p,) for p in layout), layout)


@define(eq=False)
class _SplitStep:
    """The problems of the mesh dims, from the parts of all factors."""

    problem: StepProblem
    reference: Assignment
    work: WorkTable
    _unary: list[list[Floats]] = field(init=False)
    _pairs: list[list[tuple[int, int, Floats]]] = field(init=False)
    _moves: CheapMoves = field(init=False)
    _rests: dict[int, _Side] = field(init=False)
    _known: dict[Any, Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        problem, graph = self.problem, self.problem.graph
        self._moves = CheapMoves(step_costs(tuple(graph.mesh.shape), links_of(graph.mesh)))
        works = [self._work(place) for place in range(len(graph.calls))]
        self._unary = [[parts[m] for parts in works] for m in self._dims]
        self._pairs = [[] for _ in self._dims]
        self._rests = {}
        for t in sorted(problem.resting):
            states = tuple(self._states(t, m) for m in self._dims)
            self._rests[t] = _Side(len(graph.calls) + len(self._rests), states, self.reference.rests[t])
            for m in self._dims:
                self._unary[m].append(np.zeros(len(states[m])))

    @property
    def _dims(self) -> range:
        return range(self.problem.graph.mesh.ndim)

    def bound(self) -> int:
        problem = self.problem
        for place, call in enumerate(problem.graph.calls):
            for i, t in enumerate(call.operands):
                if t is not None:
                    self._move(t, self._from(t), self._used(place, i), must_stay=problem.must_stay(place, i))
            for k, t in enumerate(call.results):
                if t is None:
                    continue
                side = made = self._made(place, k)
                if t in self._rests:
                    side = self._rests[t]
                    self._move(t, made, side)
                self._end(t, side)
        for t in sorted(problem.free):
            self._price(t, self._rests[t])
        return max(0, sum(self._least(m) for m in self._dims))

    def _least(self, m: int) -> int:
        """The least cost of the parts of a mesh dim. Costs of a graph are whole and not negative, so they are moved."""
        known: dict[int, tuple[Any, int]] = {}

        def whole(costs: Floats) -> tuple[Any, int]:
            if id(costs) not in known:
                least = math.floor(costs.min())
                known[id(costs)] = np.minimum(np.floor(costs - least), FORBIDDEN).astype(np.int64), least
            return known[id(costs)]

        unary = [whole(costs) for costs in self._unary[m]]
        pairs = [(u, v, *whole(costs)) for u, v, costs in self._pairs[m]]
        graph = CostGraph(tuple(costs for costs, _ in unary), tuple((u, v, costs) for u, v, costs, _ in pairs))
        return _least(graph) + sum(least for _, least in unary) + sum(least for *_, least in pairs)

    # -- states --------------------------------------------------------------------------------------------------

    def _rows(self, place: int, m: int) -> tuple[int, ...]:
        choices, only = self.problem.choices[place], self.problem.held_rows.get(place)
        legal = choices.legal[m]
        return legal if only is None else tuple(r for r in legal if r in only[m])

    def _made(self, place: int, k: int) -> _Side:
        t = self.problem.graph.calls[place].results[k]
        assert t is not None
        states = tuple(self._placements(place, k, m, made=True) for m in self._dims)
        return _Side(place, states, self.problem.made(self.reference, t))

    def _used(self, place: int, i: int) -> _Side:
        states = tuple(self._placements(place, i, m, made=False) for m in self._dims)
        return _Side(place, states, self.problem.used(self.reference, place, i))

    def _from(self, t: int) -> _Side:
        """Where the uses of a tensor take it."""
        maker = self.problem.maker(t)
        if t in self._rests:
            return self._rests[t]
        return _Side.fixed(self.problem.made(self.reference, t)) if maker is None else self._made(*maker)

    def _placements(self, place: int, k: int, m: int, *, made: bool) -> tuple[Placement, ...]:
        """Those of an operand or a result on a mesh dim, by row."""
        choices = self.problem.choices[place]
        key = ("placements", id(choices), self.problem.held_rows.get(place), k, m, made)
        known = self._known.get(key)
        if known is None:
            rows = [choices.rows[r] for r in self._rows(place, m)]
            each = tuple(placed((row.outputs if made else row.inputs)[k]) for row in rows)
            known = self._known[key] = self.problem.slices.interned(each)
        result: tuple[Placement, ...] = known
        return result

    def _states(self, t: int, m: int) -> tuple[Placement, ...]:
        """Where a tensor may rest on a mesh dim, whatever the others are."""
        problem, slices = self.problem, self.problem.slices
        held = slices.interned((self.reference.rests[t][m],))
        if m in problem.held_rests.get(t, ()):
            return held
        if t in problem.free:
            return slices.interned(self._places(t, m))
        maker = problem.maker(t)
        assert maker is not None, "inputs stay where they are"
        made = self._placements(*maker, m, made=True)
        wanted = [self._placements(user, i, m, made=False) for user, i in problem.graph.uses.get(t, ())]
        wanted += [slices.interned((s.placements[m],)) for s in problem.graph.ends.get(t, ())]
        wanted += [slices.interned(self._places(leaf, m)) for leaf, _ in problem.free_leaves(t)]
        return slices.union(made, [*wanted, held])

    def _places(self, leaf: int, m: int) -> tuple[Placement, ...]:
        held = self.reference.rests[leaf][m]
        if leaf in self.problem.pinned:
            return (held,)
        dims = range(len(self.problem.graph.tensors[leaf].spec.shape))
        return tuple(dict.fromkeys([held, REPLICATE, *map(Shard, dims)]))

    # -- factors -------------------------------------------------------------------------------------------------

    def _work(self, place: int) -> list[Floats]:
        problem = self.problem
        choices, at = problem.choices[place], self.reference.rows[place]
        key = ("work", id(choices), tuple(at), problem.held_rows.get(place))
        known = self._known.get(key)
        if known is None:
            rows = [self._rows(place, m) for m in self._dims]
            index = tuple(of.index(r) for of, r in zip(rows, at, strict=True))
            table = self.work(place, rows)
            if table.size <= _MOST_COMBINATIONS:
                self._put_in_what_is_sent(place, rows, table)
            table[index] = problem.own_cost(place, at)
            known = self._known[key] = split(table, index)
        parts: list[Floats] = known
        return parts

    def _put_in_what_is_sent(self, place: int, rows: Sequence[Sequence[int]], table: Floats) -> None:
        """Put the exact costs of combinations in that have a lowering, which may send."""
        choices = self.problem.choices[place]
        lowered = {r for of in rows for r in of if choices.rows[r].lowered}
        if not lowered:
            return
        for index, chosen in zip(np.ndindex(table.shape), product(*rows), strict=True):
            if not lowered.isdisjoint(chosen):
                legal = choices.allows(chosen)
                table[index] = self.problem.own_cost(place, chosen) if legal else FORBIDDEN

    def _end(self, t: int, side: _Side) -> None:
        """Add what a tensor costs at its end: moves to its sinks, and the price of what is kept of it."""
        for sink in self.problem.graph.ends.get(t, ()):
            leaf = sink.leaf if sink.leaf in self.problem.free else None
            target = _Side.fixed(sink.placements) if leaf is None else self._rests[leaf]
            self._move(t, side, target, must_stay=sink.stays, shared_by=sink.shared_by)
        self._price(t, side)

    def _price(self, t: int, side: _Side) -> None:
        if not self.problem.has_price(t) or side.variable is None:
            return
        meta = self.problem.graph.tensors[t].spec.tensor_meta
        assert self.problem.memory is not None
        times = self.problem.memory.kept[t]
        key = ("price", meta, times, side.at, *map(id, side.states))
        known = self._known.get(key)
        if known is None:
            each = [
                [1 / n if shard_dim(p) is not None else 1.0 for p in of]
                for of, n in zip(side.states, self._sizes, strict=True)
            ]
            nbytes = meta.nbytes * _product(each)
            table = np.maximum(np.floor((nbytes * float(times) - 1) * float(self.problem.price) * SAFE), 0.0)
            index = tuple(of.index(p) for of, p in zip(side.states, side.at, strict=True))
            table[index] = self.problem.byte_cost(t, side.at)
            known = self._known[key] = split(table, index)
        self._add(side.variable, known)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self.problem.graph.mesh.shape)

    def _add(self, variable: int, parts: Sequence[Floats]) -> None:
        for m, part in enumerate(parts):
            self._unary[m][variable] = self._unary[m][variable] + part

    def _move(self, t: int, source: _Side, target: _Side, *, must_stay: bool = False, shared_by: int = 1) -> None:
        """Add the parts of a move."""
        meta = self.problem.graph.tensors[t].spec.tensor_meta
        lists = (*map(id, source.states), *map(id, target.states))
        key = ("move", meta, must_stay, shared_by, source.at, target.at, lists)
        known = self._known.get(key)
        if known is None:
            # The lists are kept: no other one may get the identity of one of them.
            known = self._known[key] = self._parts_of_move(t, source, target, must_stay, shared_by), source, target
        u, v = source.variable, target.variable
        for m, part in enumerate(known[0]):
            if u is not None and v is not None:
                self._pairs[m].append((u, v, part))
            elif u is not None or v is not None:
                variable = v if u is None else u
                assert variable is not None
                self._unary[m][variable] = self._unary[m][variable] + part.reshape(-1)

    def _parts_of_move(self, t: int, source: _Side, target: _Side, must_stay: bool, shared_by: int) -> list[Floats]:
        """By mesh dim, an array over the states of the source and of the target.

        Pairs of placements of one kind cost the same, but for the pair of the reference, which is exact.
        """
        problem = self.problem
        ends = list(zip(source.at, target.at, strict=True))
        codes, kinds = [], []
        for of, to, at in zip(source.states, target.states, ends, strict=True):
            kinds.append([*KINDS, kind_of_move(*at)])
            code = {(a, b): _REFERENCE if (a, b) == at else kind_of_move(a, b) for a in set(of) for b in set(to)}
            # Only views make strided shards: see StepProblem.move().
            code.update({(a, b): _NEVER for a, b in code if is_strided((b,)) and a != b})
            codes.append(np.array([[code[a, b] for b in to] for a in of]))
        if must_stay:
            stays = [
                np.array([[a == b for b in to] for a in of])
                for of, to in zip(source.states, target.states, strict=True)
            ]
            return [np.where(same, 0.0, float(FORBIDDEN)) for same in stays]
        table = self._moves.table(problem.graph.tensors[t].spec.tensor_meta.nbytes, kinds) / shared_by
        exact = problem.move(t, source.at, target.at)
        table[(_REFERENCE,) * len(ends)] = exact if exact >= FORBIDDEN else exact // shared_by
        parts = split(table, (_REFERENCE,) * len(ends))
        return [np.append(part, float(FORBIDDEN))[code] for part, code in zip(parts, codes, strict=True)]


def _product(each: Sequence[Sequence[float]]) -> Floats:
    return reduce(np.multiply.outer, [np.array(of) for of in each])


def _least(graph: CostGraph) -> int:
    """The optimum of a graph, or a bound on it where that is out of reach."""
    try:
        return eliminate(graph, _MOST_ENTRIES)[1]
    except TableLimitError:
        pass
    try:
        return lower_bound(graph)
    except MissingSolverError:
        return sum(int(costs.min()) for costs in graph.unary) + sum(int(costs.min()) for *_, costs in graph.pairs)
