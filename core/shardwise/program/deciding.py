"""From the solution of a step to its decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardwise.kernel.tags import DEPTH, call_digest
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.decisions import Decision, Decisions
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["decide", "decision_of", "united"]


def decision_of(problem: StepProblem, assignment: Assignment, place: int) -> Decision:
    """What an assignment decides about one call."""
    call = problem.graph.calls[place]
    sources = tuple(None if t is None else problem.rests(assignment, t) for t in call.operands)
    inputs = tuple(None if t is None else problem.used(assignment, place, i) for i, t in enumerate(call.operands))
    outputs = tuple(None if t is None else problem.made(assignment, t) for t in call.results)
    rests = tuple(None if t is None else problem.rests(assignment, t) for t in call.results)
    return Decision(sources, inputs, outputs, rests)


def decide(problem: StepProblem, assignment: Assignment, depth: int = DEPTH) -> tuple[Decisions, dict[int, list[int]]]:
    """The decisions of an assignment, and the digests that it is torn over, each with its calls (indices).

    Calls with one digest and the same layouts of operands get one decision: the most frequent, the earliest of these.
    """
    tags = problem.graph.tags(depth)
    exact: dict[int, dict[Decision, list[int]]] = {}
    loose: dict[int, dict[Decision, list[int]]] = {}
    left: set[int] = set()
    for call in problem.graph.dead:
        of = [None if t is None else tags[t] for t in call.operands]
        left.update(call_digest(call.schema, of, sizes=sizes) for sizes in (True, False))
    for place, call in enumerate(problem.graph.calls):
        of = [None if t is None else tags[t] for t in call.operands]
        if problem.choices[place].problem is None:
            left.update(call_digest(call.schema, of, sizes=sizes) for sizes in (True, False))
            continue
        decision = decision_of(problem, assignment, place)
        for table, sizes in ((exact, True), (loose, False)):
            table.setdefault(call_digest(call.schema, of, sizes=sizes), {}).setdefault(decision, []).append(place)
    torn = {}
    for digest, by in exact.items():
        sources = [decision.sources for decision in by]
        if len(set(sources)) < len(sources):
            torn[digest] = sorted(p for places in by.values() for p in places)

    def ranked(by: Mapping[Decision, list[int]]) -> tuple[Decision, ...]:
        order = sorted(by, key=lambda d: (-len(by[d]), by[d][0]))
        return tuple({d.sources: d for d in reversed(order)}[s] for s in dict.fromkeys(d.sources for d in order))

    shape = tuple(problem.graph.mesh.shape)
    with_sizes, without = ({digest: ranked(by) for digest, by in table.items()} for table in (exact, loose))
    return Decisions(shape, with_sizes, without, depth, frozenset(left)), torn


def united(problem: StepProblem, assignment: Assignment, torn: Mapping[int, list[int]]) -> Assignment:
    """An assignment in which the calls of each torn digest that find their operands alike do the same: what most of
    them do. The same assignment where that would not be legal.
    """
    new = assignment.copy()
    for places in torn.values():
        alike: dict[tuple[object, ...], Counter[Decision]] = {}
        first: dict[Decision, int] = {}
        decisions = [decision_of(problem, assignment, place) for place in places]
        for place, decision in zip(places, decisions, strict=True):
            alike.setdefault(decision.sources, Counter())[decision] += 1
            first.setdefault(decision, place)
        for place, decision in zip(places, decisions, strict=True):
            model = first[alike[decision.sources].most_common(1)[0][0]]
            if problem.choices[place] is problem.choices[model]:
                new.rows[place] = list(assignment.rows[model])
                of = zip(problem.graph.calls[place].results, problem.graph.calls[model].results, strict=True)
                new.rests.update({t: assignment.rests[u] for t, u in of if t in problem.resting and u is not None})
    new.cost = problem.cost(new)
    return new if new.cost < FORBIDDEN else assignment
