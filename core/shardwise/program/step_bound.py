"""A lower bound on the cost of a step: no plan can be cheaper.

On one mesh dim the exact solution is its own bound. On several it comes from the states of all mesh dims together
(:mod:`shardwise.program.joint_bound`). Where their tables are too large, on five mesh dims for instance, the joint
costs are split into parts, one per mesh dim, that together never exceed them; each mesh dim is then solved by itself,
and the sum of the least costs is a bound.

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
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define

from shardwise.program.cheap_moves import Floats
from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.elimination import eliminate
from shardwise.program.errors import MissingSolverError, TableLimitError
from shardwise.program.joint_bound import joint_bound
from shardwise.program.relaxation import lower_bound
from shardwise.program.step_factors import StepFactors, WorkTable
from shardwise.program.step_parts import Factor
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_solution import MeshDimProblem

__all__ = ["WorkTable", "step_bound"]

_ROUNDS, _WORK = 120, 1_200_000
"""Rounds that a bound takes at most, and variables of all mesh dims that they go through together: minutes at most."""

_RATE, _SLOWER = 0.5, 20
"""How much of what is missing a round gives at most, and the rounds after which it is half as much."""

_MOST_ENTRIES = 3_000_000
"""Entries of the largest table of a mesh dim's exact solution; beyond it a linear program bounds it."""


def step_bound(problem: StepProblem, reference: Assignment, work: WorkTable) -> int:
    """A lower bound on the cost of every assignment of a problem, in nanoseconds, at the price that it has.

    ``reference`` is a good assignment: the bound is the closer the better it is. ``work(place, rows)`` gives, for lists
    of rows by mesh dim, an array of nanoseconds by combination that is never more than what the call costs.
    """
    if problem.graph.mesh.ndim == 1:
        # What the mesh dim's own problem costs beside the others is all there is.
        return _least(MeshDimProblem(problem, reference, 0).cost_graph())
    step = StepFactors(problem, reference, work)
    joint = joint_bound(step, reference.cost)
    return _Ascent(step, reference.cost).bound() if joint is None else joint


@define(eq=False)
class _Ascent:
    """Rounds that bring the parts closer to the costs of what the mesh dims choose by themselves.

    The bound of every round holds; the best one counts. ``enough`` is the cost of a plan, which no bound exceeds: a
    round gives no more to what is missing than is wanting to that, so that few wrong guesses do not lose it all.
    """

    step: StepFactors
    enough: int

    def bound(self) -> int:
        """The best bound of a number of rounds that depends on the size of the step alone."""
        rounds = max(1, min(_ROUNDS, _WORK // (len(self.step.sizes) * len(self._dims))))
        best = 0
        for k in range(rounds):
            found = [self._least(m) for m in self._dims]
            total = sum(least for _, least in found)
            best = max(best, total)
            chosen = [states for states, _ in found if states is not None]
            if total >= self.enough or len(chosen) < len(found) or k == rounds - 1:
                break
            self._raise(chosen, self.enough - total, k)
        return best

    @property
    def _dims(self) -> range:
        return range(self.step.problem.graph.mesh.ndim)

    def _raise(self, chosen: Sequence[Sequence[int]], wanting: int, k: int) -> None:
        """Raise what is chosen by a part of what it costs more than its parts."""
        at = {factor: self._kinds(chosen, factor, uses) for factor, uses in self.step.uses.items()}
        missing = sum(factor.missing(kinds) * n for factor, of in at.items() for kinds, n in of.items())
        rate = min(_RATE, wanting / max(missing, 1.0)) / (1 + k / _SLOWER)
        for factor, of in at.items():
            factor.raise_at(of, rate, k % len(chosen))

    def _kinds(
        self, chosen: Sequence[Sequence[int]], factor: Factor, uses: Sequence[tuple[int, int | None]]
    ) -> Counter[tuple[int, ...]]:
        """The combinations of kinds that are chosen of a factor, and how often."""
        counts: Counter[tuple[int, ...]] = Counter()
        for u, v in uses:
            states = [(of[u],) if v is None else (of[u], of[v]) for of in chosen]
            counts[tuple(int(kinds[s]) for kinds, s in zip(factor.kinds, states, strict=True))] += 1
        return counts

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
