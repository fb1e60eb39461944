"""A lower bound on the cost of a step: no plan can be cheaper.

On one mesh dim the exact solution is its own bound. On several, the joint costs are split into parts, one per mesh dim,
that together never exceed them; each mesh dim is then solved by itself, and the sum of the least costs is a bound.

What is split is one *factor* after the other: the work of a call, or a move of a tensor. Its parts are exact at first
for a given assignment, the reference: there they add up to the factor's cost. Elsewhere they are lowered until no
combination of them exceeds a cost that is known to be too low: the work by the bytes and operations of a rank, a move
by what it sends with all other mesh dims sharded.

Then the bound ascends. What the mesh dims choose by themselves is a combination that costs more than its parts. These
are raised towards the exact cost, and parts that nobody chooses give way: :mod:`shardwise.program.step_parts`. So the
mesh dims come to agree, as far as a split can make them, in rounds that each give a bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field, frozen

from shardwise.kernel.placements import REPLICATE, Placement, Shard, is_strided, shard_dim
from shardwise.planning.cost import links_of, step_costs
from shardwise.program.cheap_moves import KINDS, SAFE, CheapMoves, Floats, kind_of_move
from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.elimination import eliminate
from shardwise.program.errors import MissingSolverError, TableLimitError
from shardwise.program.relaxation import lower_bound
from shardwise.program.step_graph import Places
from shardwise.program.step_parts import Factor, Indices, split
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_slices import placed
from shardwise.program.step_solution import MeshDimProblem

__all__ = ["WorkTable", "step_bound"]

WorkTable: TypeAlias = Callable[[int, Sequence[Sequence[int]]], Floats]

_ROUNDS, _WORK = 120, 1_200_000
"""Rounds that a bound takes at most, and variables of all mesh dims that they go through together: minutes at most."""

_RATE, _SLOWER, _GROWTH = 0.5, 20, 1.5
"""How much of what is missing a round gives, at first, the rounds after which it is half as much, and how much faster
it becomes with each better bound where it was slowed down.
"""

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
    return _Ascent(_SplitStep(problem, reference, work), reference.cost).bound()


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
    """The problems of the mesh dims, from the parts of all factors.

    Variables are the calls, in order, then the tensors that rest.
    """

    problem: StepProblem
    reference: Assignment
    work: WorkTable
    #: Per factor, the variables that it is between, once per use; a factor of one variable has no second.
    uses: dict[Factor, list[tuple[int, int | None]]] = field(factory=dict, init=False)
    #: Per variable and mesh dim, its number of states.
    sizes: list[tuple[int, ...]] = field(init=False)
    #: What is fixed by mesh dim, in pairs: operands that must stay.
    fixed: list[tuple[int, int | None, Sequence[Floats]]] = field(factory=list, init=False)
    _moves: CheapMoves = field(init=False)
    _rests: dict[int, _Side] = field(init=False)
    _known: dict[Any, Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        problem, graph = self.problem, self.problem.graph
        self._moves = CheapMoves(step_costs(tuple(graph.mesh.shape), links_of(graph.mesh)))
        self.sizes = [tuple(len(self._rows(place, m)) for m in self._dims) for place in range(len(graph.calls))]
        self._rests = {}
        for t in sorted(problem.resting):
            states = tuple(self._states(t, m) for m in self._dims)
            self._rests[t] = _Side(len(self.sizes), states, self.reference.rests[t])
            self.sizes.append(tuple(map(len, states)))
        for place in range(len(graph.calls)):
            self._use(self._work(place), place)
        self._add_moves()

    @property
    def _dims(self) -> range:
        return range(self.problem.graph.mesh.ndim)

    def _use(self, factor: Factor, u: int, v: int | None = None) -> None:
        self.uses.setdefault(factor, []).append((u, v))

    def _add_moves(self) -> None:
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

    def _work(self, place: int) -> Factor:
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

            def exact(kinds: Sequence[int]) -> float:
                chosen = [of[r] for of, r in zip(rows, kinds, strict=True)]
                return problem.own_cost(place, chosen) if choices.allows(chosen) else FORBIDDEN

            known = self._known[key] = _factor(table, index, [np.arange(len(of)) for of in rows], exact)
        factor: Factor = known
        return factor

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
        problem = self.problem
        if not problem.has_price(t) or side.variable is None:
            return
        meta = problem.graph.tensors[t].spec.tensor_meta
        assert problem.memory is not None
        times = problem.memory.kept[t]
        key = ("price", meta, times, side.at, *map(id, side.states))
        known = self._known.get(key)
        if known is None:
            each = [
                [1 / n if shard_dim(p) is not None else 1.0 for p in of]
                for of, n in zip(side.states, problem.graph.mesh.shape, strict=True)
            ]
            nbytes = meta.nbytes * _product(each)
            table = np.maximum(np.floor((nbytes * float(times) - 1) * float(problem.price) * SAFE), 0.0)
            index = tuple(of.index(p) for of, p in zip(side.states, side.at, strict=True))
            table[index] = problem.byte_cost(t, side.at)

            def exact(kinds: Sequence[int]) -> float:
                return problem.byte_cost(t, tuple(of[k] for of, k in zip(side.states, kinds, strict=True)))

            # The lists are kept: no other one may get the identity of one of them.
            known = self._known[key] = _factor(table, index, [np.arange(len(of)) for of in side.states], exact), side
        self._use(known[0], side.variable)

    def _move(self, t: int, source: _Side, target: _Side, *, must_stay: bool = False, shared_by: int = 1) -> None:
        """Add a move."""
        u, v = source.variable, target.variable
        if u is None and v is None:
            return
        meta = self.problem.graph.tensors[t].spec.tensor_meta
        lists = (*map(id, source.states), *map(id, target.states))
        key = ("move", meta, must_stay, shared_by, source.at, target.at, lists)
        if u is None:
            assert v is not None
            u, v = v, None
        # The lists are kept: no other one may get the identity of one of them.
        if must_stay:
            if key not in self._known:
                self._known[key] = _stays(source, target), source, target
            self.fixed.append((u, v, self._known[key][0]))
        else:
            if key not in self._known:
                self._known[key] = self._moved(t, source, target, shared_by), source, target
            self._use(self._known[key][0], u, v)

    def _moved(self, t: int, source: _Side, target: _Side, shared_by: int) -> Factor:
        """The factor of a move. Its kinds are pairs of placements.

        They share codes, and cost the same, where a bound on moves sees no difference; all but the pair of the
        reference, which is exact.
        """
        problem = self.problem
        ends = tuple(zip(source.at, target.at, strict=True))
        pairs = [
            tuple(dict.fromkeys((a, b) for a in of for b in to))
            for of, to in zip(source.states, target.states, strict=True)
        ]
        kinds = []
        for of, to, each in zip(source.states, target.states, pairs, strict=True):
            number = {pair: k for k, pair in enumerate(each)}
            # Only views make strided shards: see StepProblem.move().
            kind = [[-1 if is_strided((b,)) and a != b else number[a, b] for b in to] for a in of]
            kinds.append(np.array(kind, np.intp).reshape(_shape(source, target, len(of), len(to))))
        codes = [
            np.array([len(KINDS) if pair == at else kind_of_move(*pair) for pair in each], np.intp)
            for each, at in zip(pairs, ends, strict=True)
        ]
        table = (
            self._moves.table(
                problem.graph.tensors[t].spec.tensor_meta.nbytes, [[*KINDS, kind_of_move(*at)] for at in ends]
            )
            / shared_by
        )
        reference = (len(KINDS),) * len(ends)
        table[reference] = self._move_cost(t, source.at, target.at, shared_by)

        def exact(chosen: Sequence[int]) -> float:
            src, dst = zip(*(of[k] for of, k in zip(pairs, chosen, strict=True)), strict=True)
            return self._move_cost(t, src, dst, shared_by)

        return _factor(table, reference, kinds, exact, codes)

    def _move_cost(self, t: int, src: Places, dst: Places, shared_by: int) -> int:
        cost = self.problem.move(t, src, dst)
        return cost if cost >= FORBIDDEN else cost // shared_by


def _factor(
    table: Floats,
    at: tuple[int, ...],
    kinds: Sequence[Indices],
    exact: Callable[[Sequence[int]], float],
    codes: Sequence[Indices] | None = None,
) -> Factor:
    table = np.floor(table)
    own = list(codes) if codes is not None else [np.arange(n) for n in table.shape]
    highest = float(table[table < FORBIDDEN].max(initial=0.0))
    table = np.minimum(table, max(highest, table[at]))
    return Factor(table, split(table, at), kinds, own, exact, max(highest, table[at]))


def _shape(source: _Side, target: _Side, rows: int, columns: int) -> tuple[int, ...]:
    """That of costs between two variables, or of one."""
    if source.variable is None or target.variable is None:
        return (rows * columns,)
    return rows, columns


def _stays(source: _Side, target: _Side) -> list[Floats]:
    return [
        np.array([[0.0 if a == b else float(FORBIDDEN) for b in to] for a in of]).reshape(
            _shape(source, target, len(of), len(to))
        )
        for of, to in zip(source.states, target.states, strict=True)
    ]


def _product(each: Sequence[Sequence[float]]) -> Floats:
    return reduce(np.multiply.outer, [np.array(of) for of in each])


# -- the ascent ------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Ascent:
    """Rounds that bring the parts closer to the costs of what the mesh dims choose by themselves.

    The bound of every round holds; the best one counts, and is ``enough`` where it is the cost of a plan. Where a round
    has lost as much as there is to gain, the next ones begin again from the best parts, with smaller steps.
    """

    step: _SplitStep
    enough: int
    best: int = 0

    def bound(self) -> int:
        """The best bound of a number of rounds that depends on the size of the step alone."""
        rounds = max(1, min(_ROUNDS, _WORK // (len(self.step.sizes) * len(self._dims))))
        rate = _RATE
        for k in range(rounds):
            found = [self._least(m) for m in self._dims]
            total = sum(least for _, least in found)
            chosen = [states for states, _ in found if states is not None]
            if total > self.best or not k:
                self.best, rate = total, min(rate * _GROWTH, _RATE)
                for factor in self.step.uses:
                    factor.keep()
            elif total < 2 * self.best - self.enough:
                rate /= 2
                for factor in self.step.uses:
                    factor.restore()
            if self.best >= self.enough or len(chosen) < len(found):
                break
            self._raise(chosen, rate / (1 + k / _SLOWER), k % len(chosen))
        return max(0, self.best)

    @property
    def _dims(self) -> range:
        return range(self.step.problem.graph.mesh.ndim)

    def _raise(self, chosen: Sequence[Sequence[int]], rate: float, first: int) -> None:
        for factor, uses in self.step.uses.items():
            at: Counter[tuple[int, ...]] = Counter()
            for u, v in uses:
                states = [(of[u],) if v is None else (of[u], of[v]) for of in chosen]
                at[tuple(int(kinds[s]) for kinds, s in zip(factor.kinds, states, strict=True))] += 1
            factor.raise_at(at, rate, first)

    def _least(self, m: int) -> tuple[list[int] | None, int]:
        """What is chosen on a mesh dim, and the least cost of its parts. Costs of a graph are whole and not negative,
        so they are moved.
        """
        step = self.step
        known: dict[int, tuple[Any, int]] = {}
        kept: list[Any] = []

        def whole(costs: Floats) -> tuple[Any, int]:
            if id(costs) not in known:
                least = math.floor(costs.min())
                known[id(costs)] = np.minimum(np.floor(costs - least), FORBIDDEN).astype(np.int64), least
                kept.append(costs)
            return known[id(costs)]

        terms: list[list[Floats]] = [[] for _ in step.sizes]
        pairs: list[tuple[int, int, Any]] = []
        moved = 0
        every = [(factor.arrays()[m], uses) for factor, uses in step.uses.items()]
        every += [(arrays[m], [(u, v)]) for u, v, arrays in step.fixed]
        for part, uses in every:
            costs, least = whole(part)
            for u, v in uses:
                if v is None:
                    terms[u].append(part)
                else:
                    pairs.append((u, v, costs))
                    moved += least
        sums: dict[tuple[int, ...], Floats] = {}
        unary = []
        for size, of in zip(step.sizes, terms, strict=True):
            key = (size[m], *map(id, of))
            if key not in sums:
                sums[key] = sum(of, np.zeros(size[m]))
            costs, least = whole(sums[key])
            unary.append(costs)
            moved += least
        states, cost = _solved(CostGraph(tuple(unary), tuple(pairs)))
        return states, cost + moved


def _solved(graph: CostGraph) -> tuple[list[int] | None, int]:
    try:
        return eliminate(graph, _MOST_ENTRIES)
    except TableLimitError:
        return None, _least(graph)


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
