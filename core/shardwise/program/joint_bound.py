"""A lower bound on the cost of a step from the states of all mesh dims together.

A variable of the joint problem has one state per combination of its states on the mesh dims, so nothing that couples
the mesh dims is given up. What is given up is agreement around circles of variables: :mod:`shardwise.program.messages`.

Costs of moves come from tables of all paths (:mod:`shardwise.planning.path_table`). Others, those of strided shards and
what calls send, are known to be low enough at first (:mod:`shardwise.program.cheap_moves`), and exact where the
reference is. Each round asks for the exact costs of those that the messages would choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from attrs import define, field

from shardwise.program.folded_graph import FoldedGraph
from shardwise.program.messages import Cells, Floats, Indices, Messages, PairTable
from shardwise.program.step_factors import StepFactors
from shardwise.program.step_parts import Factor

__all__ = ["joint_bound"]

_ROUNDS, _WORK = 150, 12_000_000_000
"""Rounds at most, and entries of tables that they go through together: on four mesh dims 30 rounds, a minute or two."""

_PATIENCE, _GAIN = 15, 1e-5
"""Rounds in vain, with less than this part of the cost gained and no move found to be dearer, that are the last. A
bound that is this close to the cost is close enough.
"""

_SEVERAL = 3
"""Mesh dims up to which both ways are tried: with close costs from the start messages may come to rest early, 1 % below
the plan of 7 billion parameters, where those that learn them reach 0.5 %.
"""

_LEARNS_FROM = 4  # rounds; what the first ones would choose is far from any plan

_ROUNDING = 1e-9  # of the cost of the step: far more than what sums of doubles are off

_MOST_ENTRIES = 60_000_000
"""Entries of all tables: 1 GB with those that are turned."""

_MOST_STATES = 200_000  # of a variable


def joint_bound(step: StepFactors, enough: int) -> int | None:
    """A lower bound on the cost of every assignment, in nanoseconds; None where the tables would not fit.

    ``enough`` is the cost of a plan, which no bound exceeds.
    """
    several = step.problem.graph.mesh.ndim <= _SEVERAL
    bounds = [
        _bound(_JointTables(step, float(enough) + 1, is_close), enough) for is_close in (True, False)[: 1 + several]
    ]
    return max((bound for bound in bounds if bound is not None), default=None)


def _bound(tables: _JointTables, enough: int) -> int | None:
    """The best bound of the rounds on some tables."""
    if not tables.fit:
        return None
    messages = tables.messages()
    best = at_last_gain = -math.inf
    idle = 0
    for k in range(max(1, min(_ROUNDS, _WORK // max(1, tables.entries_of_a_round)))):
        messages.sweep()
        best = max(best, messages.bound())
        if best >= enough * (1 - _GAIN):
            break
        learned = k >= _LEARNS_FROM and tables.learn(messages)
        idle = 0 if learned or best >= at_last_gain + _GAIN * enough else idle + 1
        at_last_gain = best if idle == 0 else at_last_gain
        if idle == _PATIENCE:
            break
    return max(0, math.floor(best - _ROUNDING * enough))


@define(eq=False)
class _JointTables:
    """The joint costs of a step as a folded graph. Costs count up to ``highest``: what is that dear is in no plan."""

    step: StepFactors
    highest: float
    #: Whether all moves have close costs from the start.
    is_close: bool = True
    #: What pairs and variables cost: factors, and by mesh dim what must stay.
    _sources: list[Any] = field(factory=list, init=False)
    _graph: FoldedGraph = field(init=False)
    _unary: list[list[int]] = field(init=False)
    _pairs: dict[int, _JointPair] = field(factory=dict, init=False)
    _allowed: dict[Any, Floats] = field(factory=dict, init=False)
    _asked: set[tuple[int, ...]] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        step = self.step
        self._unary = [[] for _ in step.sizes]
        pairs: list[tuple[int, int, int]] = []
        every: list[tuple[Any, Sequence[tuple[int, int | None]]]] = list(step.uses.items())
        stays: dict[int, tuple[Any, list[tuple[int, int | None]]]] = {}
        for u, v, arrays in step.fixed:
            stays.setdefault(id(arrays), (arrays, []))[1].append((u, v))
        for source, uses in (*every, *stays.values()):
            for u, v in uses:
                if v is None:
                    self._unary[u].append(len(self._sources))
                else:
                    pairs.append((len(self._sources), u, v))
            self._sources.append(source)
        looks = [(self._rows_of(v), sizes, tuple(self._unary[v])) for v, sizes in enumerate(step.sizes)]
        self._graph = FoldedGraph(looks, pairs)
        self._pairs = {kind: _JointPair.of(self._sources[kind]) for kind in sorted({pair[0] for pair in pairs})}

    @property
    def fit(self) -> bool:
        """Whether the tables are not too large."""
        entries = sum(math.prod(pair.counts[0]) * math.prod(pair.counts[1]) for pair in self._pairs.values())
        return entries <= _MOST_ENTRIES and all(math.prod(of) <= _MOST_STATES for of in self.step.sizes)

    @property
    def entries_of_a_round(self) -> int:
        """The entries of the tables of all pairs of classes."""
        sizes = {kind: math.prod(pair.counts[0]) * math.prod(pair.counts[1]) for kind, pair in self._pairs.items()}
        return sum(sizes[kind] for kind, *_ in self._graph.counts)

    def messages(self) -> Messages:
        graph, calls = self._graph, len(self.step.problem.graph.calls)
        # A tensor that rests comes behind the first of its neighbours, which as a rule makes it.
        positions = [float(v) for v in range(len(self.step.sizes))]
        first: dict[int, int] = {}
        for _, u, v in graph.pairs:
            for a, b in ((u, v), (v, u)):
                if b < calls:
                    first[a] = min(first.get(a, b), b)
        positions[calls:] = [first.get(v, v) + 0.5 for v in range(calls, len(positions))]
        tables = {kind: pair.fill(self.highest, self.is_close) for kind, pair in self._pairs.items()}
        unary = [self._own_costs(members[0]) for members in graph.members]
        middle = [positions[members[len(members) // 2]] for members in graph.members]
        self.step.forget_paths()
        return Messages(graph, unary, tables, middle)

    def learn(self, messages: Messages) -> bool:
        """Put in the exact costs of what messages would choose; whether one was higher."""
        states = messages.chosen()
        raised = False
        for c, state in enumerate(states):
            raised |= self._put_in_own(c, state, messages.unary[c])
        for kind, u, a, v, b in self._graph.counts:
            pair = self._pairs[kind]
            if pair.factor is None or pair.is_close:
                continue
            here = pair.cells_of(states[u], states[v])
            for cells in (here, *messages.cheapest_beside(kind, here, (u, a), (v, b))):
                raised |= self._put_in(kind, cells)
        return raised

    def _put_in_own(self, c: int, state: int, costs: Floats) -> bool:
        """Put in what a state of a class costs exactly by itself."""
        v = self._graph.members[c][0]
        if (c, state) in self._asked:
            return False
        self._asked.add((c, state))
        at = tuple(int(i) for i in np.unravel_index(state, self.step.sizes[v]))
        exact = 0.0
        for source in (self._sources[number] for number in self._unary[v]):
            if isinstance(source, Factor):
                kinds = tuple(int(kind[i]) for kind, i in zip(source.kinds, at, strict=True))
                exact += self.highest if -1 in kinds else source.exact(kinds)
            else:
                exact += sum(float(part[i]) for part, i in zip(source, at, strict=True))
        before = costs[state]
        costs[state] = max(before, min(exact, self.highest))
        return bool(costs[state] > before)

    def _put_in(self, kind: int, cells: tuple[int, int]) -> bool:
        """Put in what the move between two cells costs exactly."""
        pair = self._pairs[kind]
        if (kind, *cells) in self._asked:
            return False
        self._asked.add((kind, *cells))
        kinds = pair.kinds_of(cells)
        if pair.factor is None or pair.filled is None or -1 in kinds:
            return False
        return pair.filled.raise_to(cells, min(float(pair.factor.exact(kinds)), self.highest))

    def _rows_of(self, v: int) -> Any:
        """What the allowed combinations of a call's rows depend on."""
        problem = self.step.problem
        return (id(problem.choices[v]), problem.held_rows.get(v)) if v < len(problem.graph.calls) else None

    def _own_costs(self, v: int) -> Floats:
        total = np.zeros(math.prod(self.step.sizes[v]))
        for number in self._unary[v]:
            total += _joint(self._sources[number], self.highest, is_close=self.is_close)[0].reshape(-1)
        key = self._rows_of(v)
        if key is not None:
            if key not in self._allowed:
                choices = self.step.problem.choices[v]
                rows = product(*(self.step.rows_of(v, m) for m in range(len(self.step.sizes[v]))))
                self._allowed[key] = np.array([0.0 if choices.allows(each) else self.highest for each in rows])
            total += self._allowed[key]
        return np.minimum(total, self.highest)


@define(eq=False)
class _JointPair:
    """A kind of pair by mesh dim: what it tells apart of the states of both ends."""

    source: Any
    #: By mesh dim, the source's kinds (or costs) over the cells of both ends.
    parts: list[Any]
    #: By end and mesh dim, the cell of each state, and how many cells there are.
    cells: tuple[list[Indices], list[Indices]]
    counts: tuple[list[int], list[int]]
    filled: PairTable | None = None
    #: Whether its costs are as good as exact.
    is_close: bool = False

    @classmethod
    def of(cls, source: Any) -> _JointPair:
        pair = cls(source, [], ([], []), ([], []))
        for part in source.kinds if isinstance(source, Factor) else source:
            firsts = []
            for end, lines in enumerate((part, part.T)):
                _, first, cells = np.unique(lines, axis=0, return_index=True, return_inverse=True)
                firsts.append(first)
                pair.cells[end].append(cells.reshape(-1))
                pair.counts[end].append(len(first))
            pair.parts.append(part[np.ix_(*firsts)])
        return pair

    @property
    def factor(self) -> Factor | None:
        return self.source if isinstance(self.source, Factor) else None

    def fill(self, highest: float, is_close: bool) -> PairTable:
        """Make the table of the costs over cells of all mesh dims together."""
        ndim = len(self.parts)
        costs, self.is_close = _joint(
            self.source, highest, [part.reshape(-1) for part in self.parts], is_close=is_close
        )
        costs = costs.reshape([n for both in zip(*self.counts, strict=True) for n in both])
        costs = costs.transpose([*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)])
        shape = math.prod(self.counts[0]), math.prod(self.counts[1])
        ends = [Cells(_flat(cells, counts), n) for cells, counts, n in zip(self.cells, self.counts, shape, strict=True)]
        self.filled = PairTable(np.ascontiguousarray(costs.reshape(shape)), (ends[0], ends[1]))
        return self.filled

    def cells_of(self, u: int, v: int) -> tuple[int, int]:
        """The cells of two states."""
        assert self.filled is not None
        return int(self.filled.ends[0].of[u]), int(self.filled.ends[1].of[v])

    def kinds_of(self, cells: tuple[int, int]) -> tuple[int, ...]:
        """The kinds of the factor, by mesh dim."""
        places = [np.unravel_index(cell, counts) for cell, counts in zip(cells, self.counts, strict=True)]
        return tuple(int(part[i, j]) for part, i, j in zip(self.parts, *places, strict=True))


def _joint(source: Any, highest: float, parts: Sequence[Any] | None = None, *, is_close: bool) -> tuple[Floats, bool]:
    """The costs of combinations of states, or of the given parts, one by mesh dim; and whether all are close to the
    exact ones.
    """
    if not isinstance(source, Factor):
        costs: Floats = np.minimum(reduce(np.add.outer, source if parts is None else parts), highest)
        return costs, True
    kinds = source.kinds if parts is None else parts
    codes = [np.append(codes, 0)[kind] for codes, kind in zip(source.codes, kinds, strict=True)]
    costs = np.minimum(source.costs[np.ix_(*codes)], highest)
    close = source.close() if is_close else None
    if close is not None:
        np.maximum(costs, np.minimum(close[0][np.ix_(*kinds)], highest), out=costs)
    costs[reduce(np.logical_or.outer, [kind == -1 for kind in kinds])] = highest
    return costs, close is not None and close[1]


def _flat(cells: Sequence[Indices], counts: Sequence[int]) -> Indices:
    """The cells of combinations of states, as one number each."""
    total: Indices = np.zeros(1, np.intp)
    for of, n in zip(cells, counts, strict=True):
        total = np.add.outer(total * n, of).reshape(-1)
    return total
