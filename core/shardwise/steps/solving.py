"""Solve a recorded step: its problem, the best assignment, and the decisions. Arithmetic alone."""

from __future__ import annotations

from attrs import frozen

from shardwise.kernel.tags import DEPTH
from shardwise.program.collection import no_collection
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.deciding import decide
from shardwise.program.decisions import Decisions
from shardwise.program.replay import DEEPEST, replayed
from shardwise.program.step_graph import StepGraph
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_solution import solve_step
from shardwise.steps.costs import WorkCosts

__all__ = ["Solved", "solve_graph", "with_decisions"]

#: How deep tags look. Deeper ones where equal tags would want different decisions; they make more plans.
_DEPTHS = (DEPTH, 6, DEEPEST)


@frozen(eq=False)
class Solved:
    """A step, what was chosen op by op when it was recorded, the best assignment, and its decisions.

    ``torn`` counts the keys whose calls want different decisions with the deepest tags, and were not given one: each
    takes the most frequent one.
    """

    problem: StepProblem
    costs: WorkCosts
    recorded: Assignment
    best: Assignment
    decisions: Decisions
    torn: int

    @property
    def seconds(self) -> float:
        """Seconds of the step by the cost model."""
        return self.best.cost / NANOSECONDS

    @property
    def recorded_seconds(self) -> float | None:
        """Seconds of the step as it was recorded; None where it moves or shards a tensor as no plan may."""
        is_legal = self.recorded.cost < FORBIDDEN and not self.problem.has_lost
        return None if not is_legal else self.recorded.cost / NANOSECONDS


def solve_graph(graph: StepGraph) -> Solved:
    """Decide for a recorded step. Every rank with the same graph gets the same decisions.

    Raises :class:`NoPlanError` where no legal assignment is found.
    """
    with no_collection():
        costs = WorkCosts(graph)
        problem = StepProblem(graph, costs)
        recorded = problem.as_recorded()
        # What was chosen op by op may move a tensor that is written later. From there descent would not improve.
        starts = [recorded] if recorded.cost < FORBIDDEN else [recorded, problem.as_replicated()]
        if problem.has_lost:
            starts = [problem.as_replicated()]
        best = solve_step(problem, starts)
        problem.forget_searches()
        return with_decisions(problem, costs, recorded, best)


def with_decisions(problem: StepProblem, costs: WorkCosts, recorded: Assignment, best: Assignment) -> Solved:
    """An assignment with its decisions by tag. Calls that look the same are given one decision, as a run does it."""
    for depth in _DEPTHS:
        decisions, torn = decide(problem, best, depth)
        if not torn:
            break
    if torn and (followed := replayed(problem, best, _DEPTHS[-1])) is not None:
        best = followed
        decisions, torn = decide(problem, best, _DEPTHS[-1])
    return Solved(problem, costs, recorded, best, decisions, len(torn))
