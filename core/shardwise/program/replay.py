"""What a run by decisions does: calls that look the same, and find their operands alike, do the same.

The best assignment of a step may want different things of calls that no tag tells apart: of the first layer and of the
others, say. Gone through in the order of the program, with one decision for all of them, it becomes one that a run
follows call by call. Later calls then find their operands elsewhere than they thought, so this cannot be done for one
group of calls after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from attrs import define, field

from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.deciding import decision_of
from shardwise.program.decisions import Decision, Layouts
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["DEEPEST", "replayed"]

DEEPEST = 8
"""How deep tags look at most: deeper ones tell more calls apart, and make more plans."""

_Key: TypeAlias = tuple[int, Layouts]
"""By what a run knows a call: its digest, and how its operands lie."""

_MOST_CALLS = 40_000
"""Calls that are gone through in search of better decisions for those that look the same."""


def replayed(problem: StepProblem, assignment: Assignment, depth: int, tries: int | None = None) -> Assignment | None:
    """The cheapest assignment found that a run by decisions follows, from one that it may not; None if none is legal.

    Tags look ``depth`` ops deep. The assignment is a new one. ``tries`` counts other decisions that are tried.
    """
    replay = _Replay(problem, assignment, depth)
    best = replay.run({})
    tries = _MOST_CALLS // max(len(problem.graph.calls), 1) if tries is None else tries
    chosen: dict[_Key, Decision] = {}
    for key, decision in list(replay.alternatives())[:tries]:
        if best is not None and best.cost <= assignment.cost:
            break
        found = replay.run({**chosen, key: decision})
        if found is not None and (best is None or found.cost < best.cost):
            best, chosen = found, {**chosen, key: decision}
    return best


@define(eq=False)
class _Replay:
    problem: StepProblem
    assignment: Assignment
    depth: int
    _digests: list[int] = field(init=False)
    #: Per call that is known by more than itself, the different decisions, the most frequent first.
    _ranked: dict[_Key, tuple[Decision, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        problem = self.problem
        self._digests = problem.graph.digests(problem.graph.calls, self.depth, sizes=True)
        counts: dict[_Key, dict[Decision, int]] = {}
        for place, choices in enumerate(problem.choices):
            if choices.problem is not None:
                decision = decision_of(problem, self.assignment, place)
                by = counts.setdefault((self._digests[place], decision.sources), {})
                by[decision] = by.get(decision, 0) + 1
        # The sort is stable: among equals the earliest call wins.
        self._ranked = {key: tuple(sorted(by, key=lambda d: -by[d])) for key, by in counts.items()}

    def alternatives(self) -> Iterator[tuple[_Key, Decision]]:
        """What else calls that look the same might do, in the order of the program."""
        for key, ranked in self._ranked.items():
            yield from ((key, decision) for decision in ranked[1:])

    def run(self, chosen: dict[_Key, Decision]) -> Assignment | None:
        """What the calls do with some of the decisions chosen; None where that is not legal."""
        problem = self.problem
        new = self.assignment.copy()
        taken: dict[_Key, Decision] = {}
        for place, call in enumerate(problem.graph.calls):
            if problem.choices[place].problem is None:
                self._rest(new, place, None)
                continue
            sources = tuple(None if t is None else problem.rests(new, t) for t in call.operands)
            key = self._digests[place], sources
            first = taken.get(key)
            options = [first] if first is not None else [*filter(None, [chosen.get(key)]), *self._ranked.get(key, ())]
            if not any(self._takes(new, place, decision) for decision in options):
                if first is not None:
                    return None
                self._passes(new, place, sources)
            taken[key] = decision_of(problem, new, place)
        new.cost = problem.cost(new)
        return new if new.cost < FORBIDDEN else None

    def _takes(self, new: Assignment, place: int, decision: Decision) -> bool:
        """Have a call do what was decided on, if it may."""
        rows = self.problem.choices[place].rows_with(decision.inputs, decision.outputs)
        if rows is None:
            return False
        new.rows[place] = rows
        self._rest(new, place, decision.rests)
        return decision_of(self.problem, new, place) == decision

    def _passes(self, new: Assignment, place: int, sources: Layouts) -> None:
        """Have a call for which nothing was decided do what it did; one that moved no operand moves none."""
        of = decision_of(self.problem, self.assignment, place)
        rows = None
        if of.inputs == of.sources != sources:
            rows = self.problem.choices[place].rows_with(sources, None)
        new.rows[place] = list(self.assignment.rows[place]) if rows is None else rows
        self._rest(new, place, None if of.rests == of.outputs else of.rests)

    def _rest(self, new: Assignment, place: int, rests: Layouts | None) -> None:
        """Have the results of a call rest somewhere, or where they are made."""
        for k, t in enumerate(self.problem.graph.calls[place].results):
            if t is not None and t in self.problem.resting:
                at = None if rests is None else rests[k]
                new.rests[t] = self.problem.made(new, t) if at is None else at
