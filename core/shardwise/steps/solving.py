"""Solve a recorded step: its problem, the best assignment, and the decisions. Arithmetic alone."""

from __future__ import annotations

from attrs import frozen

from shardwise.errors import MemoryPlanError, NoPlanError
from shardwise.kernel.tags import DEPTH
from shardwise.program.amounts import size_text
from shardwise.program.collection import no_collection
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.deciding import decide
from shardwise.program.decisions import Decisions
from shardwise.program.earlier import hold_earlier
from shardwise.program.replay import DEEPEST, replayed
from shardwise.program.short_solution import ShortProblem
from shardwise.program.step_graph import StepGraph
from shardwise.program.step_limit import PricedSearch
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_solution import solve_step
from shardwise.steps.costs import WorkCosts
from shardwise.steps.memory_limit import MemoryLimit

__all__ = ["Solved", "solve_graph", "with_decisions"]

#: How deep tags look. Deeper ones where equal tags would want different decisions; they make more plans.
_DEPTHS = (DEPTH, 6, DEEPEST)

_ROUNDS = 4  # of solving, until the decisions keep a limit


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
        """Seconds of the step as it was recorded; None where it moves a tensor that no plan may."""
        return self.recorded.cost / NANOSECONDS if self.recorded.cost < FORBIDDEN else None


def solve_graph(graph: StepGraph, limit: MemoryLimit | None = None, earlier: Decisions | None = None) -> Solved:
    """Decide for a recorded step. Every rank with the same arguments gets the same decisions.

    Calls that ``earlier`` decisions know do as these say, if there is a legal assignment in which they do.

    Raises :class:`NoPlanError` where no legal assignment is found, and :class:`MemoryPlanError` where none keeps the
    limit.
    """
    with no_collection():
        costs = WorkCosts(graph)
        memory = None if limit is None else StepMemory(graph, limit.state)
        problem = StepProblem(graph, costs, memory=memory)
        recorded = problem.as_recorded()
        if earlier is not None and (held := hold_earlier(problem, recorded, earlier)) is not None:
            try:
                return _solved(problem, costs, recorded, [held], limit)
            except (NoPlanError, MemoryPlanError):
                problem.let_go()
        # What was chosen op by op may move a tensor that is written later. From there descent may not improve.
        starts = [recorded] if recorded.cost < FORBIDDEN else [recorded, problem.as_replicated()]
        if problem.has_lost:
            starts = [problem.as_replicated()]
        if limit is None:
            starts, is_best = _with_layers_alike(problem, starts)
            if is_best:
                return _or_recorded(with_decisions(problem, costs, recorded, starts[0]))
        return _solved(problem, costs, recorded, starts, limit)


def _solved(
    problem: StepProblem, costs: WorkCosts, recorded: Assignment, starts: list[Assignment], limit: MemoryLimit | None
) -> Solved:
    if limit is not None:
        return _solved_within(problem, costs, recorded, starts, limit)
    best = _first_legal(problem, starts)
    problem.forget_searches()
    return _or_recorded(with_decisions(problem, costs, recorded, best))


def _first_legal(problem: StepProblem, starts: list[Assignment]) -> Assignment:
    """What descent reaches from the first start from where it reaches a legal assignment."""
    *others, last = starts
    for start in others:
        try:
            return solve_step(problem, [start])
        except NoPlanError:
            continue
    return solve_step(problem, [last])


def _with_layers_alike(problem: StepProblem, starts: list[Assignment]) -> tuple[list[Assignment], bool]:
    """Where to start in a step of many layers on several mesh dims: the best that does in each layer the same. And
    whether that is good for all layers, so that nothing is to be found from there.
    """
    short = ShortProblem.of(problem, lambda graph: StepProblem(graph, WorkCosts(graph)))
    found = None if short is None else short.solved(starts, exchanges=False)
    if short is None or found is None:
        return starts, False
    return [found], all(found is not start for start in starts) and short.repeats(found)


def _solved_within(
    problem: StepProblem, costs: WorkCosts, recorded: Assignment, starts: list[Assignment], limit: MemoryLimit
) -> Solved:
    """The best assignment that keeps a limit, also once calls that look the same do the same."""
    search = PricedSearch(problem, starts)
    most = limit.of(search.peak(recorded))
    wanted = most
    for _ in range(_ROUNDS):
        try:
            best = search.best(wanted)
        except MemoryPlanError:
            # What was recorded has run. It may be the only one that is known to fit.
            if problem.held_rows or not _is_plan(problem, recorded) or search.peak(recorded) > most:
                raise
            best = recorded
        problem.forget_searches()
        solved = with_decisions(problem, costs, recorded, best)
        beyond = search.peak(solved.best) - most
        if beyond <= 0:
            return _or_recorded(solved) if search.peak(recorded) <= most else solved
        wanted -= beyond
    raise MemoryPlanError(
        asked=f"decide for a step in which a rank holds {size_text(most)}",
        found=f"calls that look the same do the same, and hold {size_text(most + beyond)} together",
        do="Allow more memory, or run without learn().",
        limit=most,
    )


def _or_recorded(solved: Solved) -> Solved:
    """What was recorded, where that is cheaper than what a run makes of the best assignment: calls that look the same
    may want different things in that one, and have to do the same.
    """
    if solved.recorded.cost >= solved.best.cost or not _is_plan(solved.problem, solved.recorded):
        return solved
    own = with_decisions(solved.problem, solved.costs, solved.recorded, solved.recorded)
    return own if not own.torn and own.best.cost < solved.best.cost else solved


def _is_plan(problem: StepProblem, assignment: Assignment) -> bool:
    """Whether a plan may do what was recorded."""
    return assignment.cost < FORBIDDEN and not problem.has_lost


def with_decisions(problem: StepProblem, costs: WorkCosts, recorded: Assignment, best: Assignment) -> Solved:
    """An assignment with its decisions by tag. Calls that look the same are given one decision, as a run does it."""
    for depth in sorted({max(depth, problem.least_depth) for depth in _DEPTHS}):
        decisions, torn = decide(problem, best, depth)
        if not torn:
            break
    if torn and (followed := replayed(problem, best, depth)) is not None:
        best = followed
        decisions, torn = decide(problem, best, depth)
    return Solved(problem, costs, recorded, best, decisions, len(torn))
