"""A step as a run by earlier decisions does it, and what these decided about, held while the rest is solved.

A program is learned again where it makes calls that were not known: it has begun to generate between its training
steps, for example. The calls that were known run in steps without the new ones, too. Solved anew with them, they would
take what is best for this step, and be worse in all others.
"""

from __future__ import annotations

from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.decisions import Decisions
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["hold_earlier"]


def hold_earlier(problem: StepProblem, recorded: Assignment, decisions: Decisions) -> Assignment | None:
    """Hold what calls of a step do that earlier decisions know with their sizes. What the others did when the step was
    recorded completes an assignment to begin with; None, and nothing is held, where they know none, or it is not legal.
    """
    problem.least_depth = decisions.depth
    new = recorded.copy()
    tags = problem.graph.tags(decisions.depth)
    held: list[int] = []
    for place, call in enumerate(problem.graph.calls):
        choices = problem.choices[place]
        results = [t for t in call.results if t is not None and t in problem.resting]
        new.rests.update((t, problem.made(new, t)) for t in results)
        if choices.problem is None:
            continue
        sources = tuple(None if t is None else problem.rests(new, t) for t in call.operands)
        of = [None if t is None else tags[t] for t in call.operands]
        decision = decisions.find_exact(call.schema, of, sources)
        rows = None if decision is None else choices.rows_with(decision.inputs, decision.outputs)
        if decision is None or rows is None:
            continue
        new.rows[place] = rows
        for t, rests in zip(call.results, decision.rests, strict=True):
            if t is not None and t in problem.resting:
                new.rests[t] = problem.made(new, t) if rests is None else rests
        held.append(place)
    new.cost = problem.cost(new)
    if not held or new.cost >= FORBIDDEN:
        return None
    for place in held:
        problem.held_rows[place] = tuple(frozenset((r,)) for r in new.rows[place])
        for t in problem.graph.calls[place].results:
            if t is not None and t in problem.resting:
                problem.held_rests[t] = dict(enumerate(new.rests[t]))
    return new
