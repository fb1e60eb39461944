"""The joint costs of a step, one factor after the other, with the variables that each is between.

A factor is the work of a call, a move of a tensor, or the price of what is kept of it. States are rows of calls, and
placements of tensors that rest, by mesh dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field, frozen

from shardwise.kernel.placements import REPLICATE, Placement, Shard, is_strided, shard_dim
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.cost import links_of, step_costs
from shardwise.planning.layout_graph import graph_of
from shardwise.planning.path_table import PathTable
from shardwise.program.cheap_moves import KINDS, SAFE, CheapMoves, Floats, kind_of_move
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.step_graph import Places
from shardwise.program.step_parts import Factor, Indices, split
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_rows import placed

__all__ = ["StepFactors", "WorkTable"]

WorkTable: TypeAlias = Callable[[int, Sequence[Sequence[int]]], Floats]

_HIGHEST = 200
"""How many variables' share in the cost of the step one factor counts at most, unless it does more in the reference.
What is far dearer plays no part in a good plan, and to raise it takes all others down.
"""

_MOST_COMBINATIONS = 1_500
"""Combinations of rows of a call whose lowering sends: each is looked at."""


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
class StepFactors:
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
    _paths: dict[TensorMeta, PathTable | None] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        problem, graph = self.problem, self.problem.graph
        self._moves = CheapMoves(step_costs(tuple(graph.mesh.shape), links_of(graph.mesh)))
        self.sizes = [tuple(len(self.rows_of(place, m)) for m in self._dims) for place in range(len(graph.calls))]
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
                    must_stay, keeps = problem.must_stay(place, i), problem.keeps_copy(place, i)
                    self._move(t, self._from(t), self._used(place, i), must_stay=must_stay, keeps=keeps)
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

    def rows_of(self, place: int, m: int) -> tuple[int, ...]:
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
            rows = [choices.rows[r] for r in self.rows_of(place, m)]
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

    def _factor(
        self,
        table: Floats,
        at: tuple[int, ...],
        kinds: Sequence[Indices],
        exact: Callable[[Sequence[int]], float],
        codes: Sequence[Indices] | None = None,
        close: Callable[[], tuple[Floats, bool] | None] = lambda: None,
    ) -> Factor:
        """A factor of a table of costs that are low enough, exact at a place."""
        table = np.floor(table)
        own = list(codes) if codes is not None else [np.arange(n) for n in table.shape]
        highest = min(
            float(table[table < FORBIDDEN].max(initial=0.0)), self.reference.cost * min(1.0, _HIGHEST / len(self.sizes))
        )
        highest = max(highest, float(table[at]))
        table = np.minimum(table, highest)
        return Factor(table, split(table, at), kinds, own, exact, highest, close)

    def _work(self, place: int) -> Factor:
        problem = self.problem
        choices, at = problem.choices[place], self.reference.rows[place]
        key = ("work", id(choices), tuple(at), problem.held_rows.get(place))
        known = self._known.get(key)
        if known is None:
            rows = [self.rows_of(place, m) for m in self._dims]
            index = tuple(of.index(r) for of, r in zip(rows, at, strict=True))
            table = self.work(place, rows)
            if table.size <= _MOST_COMBINATIONS:
                self._put_in_what_is_sent(place, rows, table)
            table[index] = problem.own_cost(place, at)

            def exact(kinds: Sequence[int]) -> float:
                chosen = [of[r] for of, r in zip(rows, kinds, strict=True)]
                return problem.own_cost(place, chosen) if choices.allows(chosen) else FORBIDDEN

            known = self._known[key] = self._factor(table, index, [np.arange(len(of)) for of in rows], exact)
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
            kinds = [np.arange(len(of)) for of in side.states]
            known = self._known[key] = self._factor(table, index, kinds, exact), side
        self._use(known[0], side.variable)

    def _move(
        self,
        t: int,
        source: _Side,
        target: _Side,
        *,
        must_stay: bool = False,
        shared_by: int = 1,
        keeps: bool = False,
    ) -> None:
        """Add a move; ``keeps`` says whether the copy is kept, at its price."""
        u, v = source.variable, target.variable
        if u is None and v is None:
            return
        meta = self.problem.graph.tensors[t].spec.tensor_meta
        lists = (*map(id, source.states), *map(id, target.states))
        key = ("move", meta, must_stay, shared_by, keeps, source.at, target.at, lists)
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
                self._known[key] = self._moved(t, source, target, shared_by, keeps), source, target
            self._use(self._known[key][0], u, v)

    def _moved(self, t: int, source: _Side, target: _Side, shared_by: int, keeps: bool) -> Factor:
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
        table[reference] = self._move_cost(t, source.at, target.at, shared_by, keeps)

        def exact(chosen: Sequence[int]) -> float:
            src, dst = zip(*(of[k] for of, k in zip(pairs, chosen, strict=True)), strict=True)
            return self._move_cost(t, src, dst, shared_by, keeps)

        def close() -> tuple[Floats, bool] | None:
            return self._close_costs(t, pairs, shared_by, keeps)

        return self._factor(table, reference, kinds, exact, codes, close)

    def _close_costs(
        self, t: int, pairs: Sequence[Sequence[tuple[Placement, Placement]]], shared_by: int, keeps: bool
    ) -> tuple[Floats, bool] | None:
        """The costs of moves of a tensor by pairs of placements; see :class:`Factor`. None without a table of paths."""
        spec, mesh = self.problem.graph.tensors[t].spec, self.problem.graph.mesh
        meta = spec.tensor_meta
        if meta not in self._paths:
            self._paths[meta] = PathTable.of(graph_of(spec.untagged, links_of(mesh)))
        table = self._paths[meta]
        if table is None:
            return None
        places, known = [], []
        for m, of in enumerate(pairs):
            codes = [[table.code(p) for p in pair] for pair in of]
            known.append(np.array([None not in ends for ends in codes]))
            weight = len(table.codes) ** (len(pairs) - 1 - m)
            places.append(np.array([weight * ((a or 0) * len(table.seconds) + (b or 0)) for a, b in codes], np.intp))
        seconds = table.seconds.reshape(-1)[reduce(np.add.outer, places)]
        costs = np.floor(np.floor(seconds * (NANOSECONDS * SAFE)) / shared_by)
        if keeps and self.problem.price:
            parts = [
                [1 / n if shard_dim(b) is not None else 1.0 for _, b in of]
                for of, n in zip(pairs, mesh.shape, strict=True)
            ]
            kept = np.floor(meta.nbytes * _product(parts) * float(self.problem.price) * SAFE)
            costs += np.where(seconds > 0, np.maximum(kept - 1, 0.0), 0.0)
        are_known = reduce(np.logical_and.outer, known)
        return np.where(are_known, costs, 0.0), bool(are_known.all())

    def forget_paths(self) -> None:
        """Drop the costs of all paths, which close costs are made of."""
        self._paths.clear()

    def _move_cost(self, t: int, src: Places, dst: Places, shared_by: int, keeps: bool) -> int:
        cost = self.problem.move(t, src, dst)
        if cost >= FORBIDDEN:
            return cost
        memory, kept = self.problem.memory, 0
        if keeps and src != dst and memory is not None:
            kept = int(memory.local(t, dst) * self.problem.price)
        return min(cost // shared_by + kept, FORBIDDEN)


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
