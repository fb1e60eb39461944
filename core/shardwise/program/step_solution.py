"""The solution of a step: descent over the mesh dims, each solved exactly with the joint costs of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from attrs import define, field

from shardwise.errors import NoPlanError
from shardwise.kernel.placements import Placement, is_strided
from shardwise.program.array_cache import ArrayCache
from shardwise.program.cost_graph import FORBIDDEN, CostGraph, Costs
from shardwise.program.elimination import solve
from shardwise.program.moment_prices import MomentPrices
from shardwise.program.step_graph import Places
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_slices import CallSlice, Layouts

__all__ = ["MeshDimProblem", "solve_step"]


_MOST_ENTRIES = 500_000
"""Entries of the largest table of an exact solution. Chains of layers need less. A U-Net, whose skips keep many tensors
alive, would need 3e7 and five times as long for the same cost; beyond the limit variables are fixed in turns.
"""


_SEARCHED = 2
"""Mesh dims up to which every move is searched for. On more, only those that a solution has: there are many more, and
each has more paths.
"""


def solve_step(
    problem: StepProblem, starts: Iterable[Assignment], rounds: int = 8, *, exchanges: bool = False
) -> Assignment:
    """The best assignment found by descent over the mesh dims from each start. It is no worse than any of them.

    With ``exchanges`` the best one is also tried with the parts of two mesh dims exchanged. Descent changes one mesh
    dim at a time, so it does not find by itself that, for instance, the shards of the batch should be on another one.
    Raises :class:`NoPlanError` where the result is not legal.

    There is at least one start.
    """
    best = min((_descended(problem, start, rounds) for start in starts), key=lambda found: found.cost)
    while exchanges:
        better = _best_exchange(problem, best, rounds)
        exchanges = better.cost < best.cost
        best = better if exchanges else best
    if best.cost >= FORBIDDEN:
        raise NoPlanError(
            asked=f"decide for the {len(problem.graph.calls)} calls of a step together",
            found="in every combination that was found, some call writes a tensor that would have to move, or a step "
            "takes more than 13 days by the cost model",
            do="Run the program without a plan. For a mesh that is not at hand, give its connections (wires).",
        )
    return best


def _best_exchange(problem: StepProblem, best: Assignment, rounds: int) -> Assignment:
    """What descent reaches from an assignment with two mesh dims exchanged. Of many pairs of them, or in a step of very
    many calls, only the most promising one is followed to the end.
    """
    pairs = list(combinations(range(problem.graph.mesh.ndim), 2))
    tried = [(exchanged(problem, best, a, b), (a, b)) for a, b in pairs]
    tried = [each for each in tried if not each[0].is_same(best)]
    if len(pairs) > (_FOLLOWED if len(problem.graph.calls) <= _MANY_CALLS else 1):
        begun = [_descended(problem, one, 1, pair) for one, pair in tried]
        tried = [(min(begun, key=lambda each: each.cost), (0, 0))] if begun else []
    found = (_descended(problem, one, rounds) for one, _ in tried)
    return min(found, key=lambda each: each.cost, default=best)


def _descended(problem: StepProblem, start: Assignment, rounds: int, dims: Sequence[int] = ()) -> Assignment:
    """What is reached by solving one mesh dim after the other, or some of them, until nothing changes."""
    current = start
    dims = dims or range(problem.graph.mesh.ndim)
    settled = 0  # mesh dims in a row, the last ones, that would be solved as they are
    for turn in range(rounds * len(dims)):
        better = MeshDimProblem(problem, current, dims[turn % len(dims)]).improved()
        # What has been solved need not be solved again, until another mesh dim changes.
        settled = 1 if better.cost < current.cost else settled + 1
        current = better if better.cost < current.cost else current
        if settled == len(dims):
            break
    return current


def exchanged(problem: StepProblem, assignment: Assignment, a: int, b: int) -> Assignment:
    """An assignment with the rows and placements of two mesh dims exchanged, wherever that is legal."""
    new = assignment.copy()
    for place, (choices, rows) in enumerate(zip(problem.choices, new.rows, strict=True)):
        turned = list(rows)
        turned[a], turned[b] = rows[b], rows[a]
        only = problem.held_rows.get(place, choices.legal)
        if all(turned[m] in only[m] for m in (a, b)) and choices.allows(turned):
            rows[:] = turned
    for t, layout in new.rests.items():
        if not is_strided(layout) and t not in problem.pinned and t not in problem.held_rests:
            new.rests[t] = _with(_with(layout, a, layout[b]), b, layout[a])
    new.cost = problem.cost(new)
    return new


_FOLLOWED = 3
"""Pairs of mesh dims up to which each exchange is followed to the end: those of three mesh dims."""


_MANY_CALLS = 5_000
"""Calls above which each exchange takes many seconds. 61 layers of 64 experts on 8x8x16, which are not shortened, have
7,327: following one pair saved 10 of 65 seconds, and the plan within 80 GiB cost 2.5 % less.
"""


@define(eq=False)
class MeshDimProblem:
    """The problem of one mesh dim, with the rows and layouts of the other mesh dims held.

    Its variables are the calls, in order, whose states are rows, then the tensors that rest, whose states are
    placements.
    """

    problem: StepProblem
    held: Assignment
    m: int
    #: Per call, the rows that are its states.
    calls: list[CallSlice] = field(init=False)
    #: Per tensor that rests, in order, the placements that are its states.
    states: dict[int, tuple[Placement, ...]] = field(init=False)
    _rests: dict[int, Layouts] = field(init=False)
    _exact: bool = field(default=True, init=False)
    _unary: list[Costs] = field(factory=list, init=False)
    _pairs: list[tuple[int, int, Costs]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        problem, m = self.problem, self.m
        self.calls = [problem.slices.of_call(place, held, m) for place, held in enumerate(self.held.rows)]
        self.states = {t: self._states(t) for t in sorted(problem.resting)}
        self._rests = {t: problem.slices.with_placements(self.held.rests[t], m, at) for t, at in self.states.items()}

    def improved(self) -> Assignment:
        """The best assignment that differs on this mesh dim alone; never worse than the held one."""
        exact = self.problem.graph.mesh.ndim <= _SEARCHED
        graph, m = self.cost_graph(exact=exact), self.m
        start = [call.rows.index(held[m]) for call, held in zip(self.calls, self.held.rows, strict=True)]
        start += [states.index(self.held.rests[t][m]) for t, states in self.states.items()]
        self._settle(graph, start)
        cache = ArrayCache()
        solved, cost, _ = solve(graph, _MOST_ENTRIES, start, cache)
        while self._settle(graph, solved):
            solved, cost, _ = solve(graph, _MOST_ENTRIES, min((start, solved), key=graph.cost), cache)
        better = self.held.copy()
        for chosen, call, state in zip(better.rows, self.calls, solved, strict=False):
            chosen[m] = call.rows[state]
        for (t, states), state in zip(self.states.items(), solved[len(self.calls) :], strict=True):
            better.rests[t] = _with(better.rests[t], m, states[state])
        before = graph.cost(start)
        if max(self.held.cost, before, cost) >= FORBIDDEN:
            better.cost = self.problem.cost(better)
        else:
            better.cost += cost - before
        return better

    def _settle(self, graph: CostGraph, states: Sequence[int]) -> bool:
        """Make the costs of states exact; whether they were less. What is the cheapest of all with such costs, exact
        itself, is so with exact ones.
        """
        raised = [self.problem.slices.settle(costs, states[u], states[v]) for u, v, costs in graph.pairs]
        return any(raised)

    def cost_graph(self, *, exact: bool = True) -> CostGraph:
        """The costs of all states and of all pairs of states; if not ``exact``, those of moves are the least."""
        self._exact = exact
        problem = self.problem
        self._pairs = []
        self._unary = [problem.slices.own_costs(place, call) for place, call in enumerate(self.calls)]
        variables = {t: len(self.calls) + k for k, t in enumerate(self.states)}
        for t, layouts in self._rests.items():
            self._unary.append(problem.slices.end_costs(t, layouts))
            if problem.prices is not None and t in problem.free:
                self._add(problem.prices.leaf(t, layouts), variables[t])
        for place, call in enumerate(problem.graph.calls):
            for i, operand in enumerate(call.operands):
                if operand is not None:
                    self._join_operand(place, i, operand, variables)
            for k, result in enumerate(call.results):
                if result is not None:
                    self._join_result(place, k, result, variables)
        unary: list[Costs] = [np.minimum(costs, FORBIDDEN) for costs in self._unary]
        return CostGraph(tuple(unary), tuple(self._pairs))

    def _states(self, t: int) -> tuple[Placement, ...]:
        """Where a tensor may rest: as its maker leaves it, as a use or a sink wants it; partial only if made so."""
        problem, m = self.problem, self.m
        if m in problem.held_rests.get(t, ()):
            return (self.held.rests[t][m],)
        if t in problem.free:
            return self._places(t)
        maker = problem.maker(t)
        assert maker is not None, "inputs stay where they are"
        made = self.calls[maker[0]].placements(maker[1], made=True)
        wanted = [self.calls[user].placements(i, made=False) for user, i in problem.graph.uses.get(t, ())]
        if t in problem.graph.ends:
            wanted.append(problem.slices.interned(tuple(sink.placements[m] for sink in problem.graph.ends[t])))
        wanted += [self._places(leaf) for leaf, _ in problem.free_leaves(t)]
        return problem.slices.union(made, wanted)

    def _places(self, leaf: int) -> tuple[Placement, ...]:
        """Where a free parameter may lie: where it lies now, whole, or along each dim that is long enough."""
        held, m = self.held.rests[leaf], self.m
        if leaf in self.problem.pinned:
            return (held[m],)
        return self.problem.slices.places(leaf, held, m)

    def _join_operand(self, place: int, i: int, t: int, variables: dict[int, int]) -> None:
        """Add the costs of an operand, by the rows of the call and by where the tensor comes from."""
        problem = self.problem
        targets = self.calls[place].layouts(i, made=False)
        maker = problem.maker(t)
        if t in variables:
            sources, variable = self._rests[t], variables[t]
        elif maker is None:
            source = problem.slices.only(problem.made(self.held, t))
            costs = self._moves(t, source, targets, place, i)
            if problem.keeps_copy(place, i):
                costs = costs + problem.slices.copies(place, i, source, targets)
            self._unary[place] = self._unary[place] + costs[0]
            if problem.prices is not None:
                self._add(problem.prices.operand(place, i, source, self.calls[place]), place)
            return
        else:
            sources, variable = self.calls[maker[0]].layouts(maker[1], made=True), maker[0]
        self._pairs.append((variable, place, self._moves(t, sources, targets, place, i, self._exact)))
        if problem.keeps_copy(place, i):
            self._pairs.append((variable, place, problem.slices.copies(place, i, sources, targets)))
        if problem.prices is not None:
            self._add(problem.prices.operand(place, i, sources, self.calls[place]), variable, place)

    def _moves(self, t: int, sources: Layouts, targets: Layouts, place: int, i: int, exact: bool = True) -> Costs:
        must_stay = self.problem.must_stay(place, i)
        return self.problem.slices.moves(t, sources, targets, must_stay=must_stay, exact=exact)

    def _join_result(self, place: int, k: int, t: int, variables: dict[int, int]) -> None:
        """Add the costs of a result: to where it rests, or straight to its sinks."""
        slices = self.problem.slices
        made = self.calls[place].layouts(k, made=True)
        at, source = made, place
        if t in variables:
            at, source = self._rests[t], variables[t]
            self._pairs.append((place, source, slices.moves(t, made, at, exact=self._exact)))
        elif t in self.problem.graph.ends or self.problem.has_price(t):
            self._unary[place] = self._unary[place] + slices.end_costs(t, made)
        for leaf, shared_by in self.problem.free_leaves(t):
            costs = slices.moves(t, at, self._rests[leaf], exact=self._exact or shared_by != 1)
            shared = costs if shared_by == 1 else np.where(costs >= FORBIDDEN, costs, costs // shared_by)
            self._pairs.append((source, variables[leaf], shared))
        if self.problem.prices is not None:
            self._price_result(self.problem.prices, place, k, t, variables)

    def _price_result(self, prices: MomentPrices, place: int, k: int, t: int, variables: dict[int, int]) -> None:
        """Add what it costs to hold a result, and to keep a gradient."""
        made, rests = self.calls[place].layouts(k, made=True), self._rests.get(t)
        if rests is None:
            self._add(prices.result(place, t, made, None), place)
        else:
            self._add(prices.result(place, t, made, rests), place, variables[t])
        for sink in prices.moments.gradients(t):
            source, at = (place, made) if rests is None else (variables[t], rests)
            if sink.leaf in self._rests:
                self._add(prices.gradient(t, sink, at, self._rests[sink.leaf]), source, variables[sink.leaf])
            else:
                fixed = self.problem.slices.only(sink.placements)
                self._add(prices.gradient(t, sink, at, fixed), source)

    def _add(self, costs: Costs | None, u: int, v: int | None = None) -> None:
        """Add costs by the states of a variable, or of two; None are none."""
        if costs is not None and v is None:
            self._unary[u] = self._unary[u] + costs.reshape(-1)
        elif costs is not None and v is not None:
            self._pairs.append((u, v, costs))


def _with(layout: Places, m: int, placement: Placement) -> Places:
    return (*layout[:m], placement, *layout[m + 1 :])
