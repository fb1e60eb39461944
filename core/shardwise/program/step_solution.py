"""The solution of a step: descent over the mesh dims, each solved exactly with the joint costs of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from shardwise.errors import NoPlanError
from shardwise.kernel.placements import Partial, Placement
from shardwise.program.cost_graph import FORBIDDEN, CostGraph, Costs
from shardwise.program.elimination import solve
from shardwise.program.step_graph import Places
from shardwise.program.step_problem import Assignment, StepProblem, placed

__all__ = ["MeshDimProblem", "solve_step"]


_MOST_ENTRIES = 500_000
"""Entries of the largest table of an exact solution. Chains of layers need less. A U-Net, whose skips keep many tensors
alive, would need 3e7 and five times as long for the same cost; beyond the limit variables are fixed in turns.
"""


def solve_step(problem: StepProblem, starts: Iterable[Assignment], rounds: int = 8) -> Assignment:
    """The best assignment found by descent over the mesh dims from each start. It is no worse than any of them.

    Raises :class:`NoPlanError` where it is not legal.

    There is at least one start. Equal matrices are shared by all slices, so a later round costs less than the first.
    """
    matrices: dict[Any, Costs] = {}
    best: Assignment | None = None
    for start in starts:
        current, changed = start, True
        for _ in range(rounds):
            changed = False
            for m in range(problem.graph.mesh.ndim):
                better = MeshDimProblem(problem, current, m, matrices).improved()
                if better.cost < current.cost:
                    current, changed = better, True
            if not changed:
                break
        if best is None or current.cost < best.cost:
            best = current
    problem.forget_searches()
    assert best is not None, "there is at least one start"
    if best.cost >= FORBIDDEN:
        raise NoPlanError(
            asked=f"decide for the {len(problem.graph.calls)} calls of a step together",
            found="in every combination that was found, some call writes a tensor that would have to move, or a step "
            "takes more than 13 days by the cost model",
            do="Run the program without a plan. For a mesh that is not at hand, give its connections (wires).",
        )
    return best


@define(eq=False)
class MeshDimProblem:
    """The problem of one mesh dim, with the rows and layouts of the other mesh dims held.

    Its variables are the calls, in order, whose states are rows, then the tensors that rest, whose states are
    placements. ``matrices`` are the costs of moves that are known: equal ones are one object.
    """

    problem: StepProblem
    held: Assignment
    m: int
    matrices: dict[Any, Costs]
    #: Per call, the rows that are its states.
    rows: list[list[int]] = field(init=False)
    #: Per tensor that rests, in order, the placements that are its states.
    states: dict[int, list[Placement]] = field(init=False)
    _unary: list[Costs] = field(factory=list, init=False)
    _pairs: list[tuple[int, int, Costs]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        m = self.m
        self.rows = []
        for choices, held in zip(self.problem.choices, self.held.rows, strict=True):
            fitting = (r for r in choices.legal[m] if r == held[m] or choices.allows([*held[:m], r, *held[m + 1 :]]))
            self.rows.append(list(fitting))
        self.states = {t: self._states(t) for t in sorted(self.problem.resting)}

    def improved(self) -> Assignment:
        """The best assignment that differs on this mesh dim alone; never worse than the held one."""
        graph, m = self.cost_graph(), self.m
        start = [rows.index(held[m]) for rows, held in zip(self.rows, self.held.rows, strict=True)]
        start += [states.index(self.held.rests[t][m]) for t, states in self.states.items()]
        solved, _, _ = solve(graph, _MOST_ENTRIES, start)
        better = self.held.copy()
        for chosen, rows, state in zip(better.rows, self.rows, solved, strict=False):
            chosen[m] = rows[state]
        for (t, states), state in zip(self.states.items(), solved[len(self.rows) :], strict=True):
            better.rests[t] = _with(better.rests[t], m, states[state])
        better.cost = self.problem.cost(better)
        return better

    def cost_graph(self) -> CostGraph:
        """The costs of all states and of all pairs of states."""
        problem, m = self.problem, self.m
        self._pairs = []
        self._unary = [
            _array([problem.own_cost(place, [*held[:m], r, *held[m + 1 :]]) for r in rows])
            for place, (rows, held) in enumerate(zip(self.rows, self.held.rows, strict=True))
        ]
        variables = {t: len(self.rows) + k for k, t in enumerate(self.states)}
        for t, states in self.states.items():
            self._unary.append(_array([problem.end_cost(t, _with(self.held.rests[t], m, p)) for p in states]))
        for place, call in enumerate(problem.graph.calls):
            for i, operand in enumerate(call.operands):
                if operand is not None:
                    self._join_operand(place, i, operand, variables)
            for k, result in enumerate(call.results):
                if result is not None:
                    self._join_result(place, k, result, variables)
        unary: list[Costs] = [np.minimum(costs, FORBIDDEN) for costs in self._unary]
        return CostGraph(tuple(unary), tuple(self._pairs))

    def _states(self, t: int) -> list[Placement]:
        """Where a tensor may rest: as its maker leaves it, as a use or a sink wants it; partial only if made so."""
        maker = self.problem.maker(t)
        assert maker is not None, "inputs stay where they are"
        made = [placed(self.problem.choices[maker[0]].rows[r].outputs[maker[1]]) for r in self.rows[maker[0]]]
        wanted = [
            placed(self.problem.choices[user].rows[r].inputs[i])
            for user, i in self.problem.graph.uses.get(t, ())
            for r in self.rows[user]
        ]
        wanted += [sink.placements[self.m] for sink in self.problem.graph.ends.get(t, ())]
        return list(dict.fromkeys([*made, *(p for p in wanted if not isinstance(p, Partial) or p in made)]))

    def _layouts(self, place: int, k: int, held: Places, *, made: bool) -> list[Places]:
        """The layouts of an operand or result of a call under each of its rows."""
        rows = self.problem.choices[place].rows
        sides = ((rows[r].outputs if made else rows[r].inputs) for r in self.rows[place])
        return [_with(held, self.m, placed(side[k])) for side in sides]

    def _join_operand(self, place: int, i: int, t: int, variables: dict[int, int]) -> None:
        """Add the costs of an operand, by the rows of the call and by where the tensor comes from."""
        problem = self.problem
        targets = self._layouts(place, i, problem.used(self.held, place, i), made=False)
        maker = problem.maker(t)
        if t in variables:
            sources = [_with(self.held.rests[t], self.m, p) for p in self.states[t]]
            self._pairs.append((variables[t], place, self._matrix(t, sources, targets, problem.must_stay(place, i))))
        elif maker is None:
            source = problem.made(self.held, t)
            self._unary[place] = self._unary[place] + _array(
                [problem.operand_cost(place, i, source, target) for target in targets]
            )
        else:
            sources = self._layouts(*maker, problem.made(self.held, t), made=True)
            self._pairs.append((maker[0], place, self._matrix(t, sources, targets, problem.must_stay(place, i))))

    def _join_result(self, place: int, k: int, t: int, variables: dict[int, int]) -> None:
        """Add the costs of a result: to where it rests, or straight to its sinks."""
        made = self._layouts(place, k, self.problem.made(self.held, t), made=True)
        if t in variables:
            rests = [_with(self.held.rests[t], self.m, p) for p in self.states[t]]
            self._pairs.append((place, variables[t], self._matrix(t, made, rests, False)))
        elif t in self.problem.graph.ends:
            self._unary[place] = self._unary[place] + _array([self.problem.end_cost(t, layout) for layout in made])

    def _matrix(self, t: int, sources: Sequence[Places], targets: Sequence[Places], must_stay: bool) -> Costs:
        """The cost of each source and target."""
        key = (self.problem.graph.tensors[t].spec.tensor_meta, must_stay, tuple(sources), tuple(targets))
        matrix = self.matrices.get(key)
        if matrix is None:
            rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
            small = _array(
                [
                    [(0 if a == b else FORBIDDEN) if must_stay else self.problem.move(t, a, b) for b in columns]
                    for a in rows
                ]
            )
            matrix = small[np.ix_([rows.index(a) for a in sources], [columns.index(b) for b in targets])]
            self.matrices[key] = matrix
        return matrix


def _array(costs: Sequence[object]) -> Costs:
    return np.array(costs, np.int64)


def _with(layout: Places, m: int, placement: Placement) -> Places:
    return (*layout[:m], placement, *layout[m + 1 :])
