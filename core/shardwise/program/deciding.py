"""From the solution of a step to its decisions."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.kernel.tags import DEPTH
from shardwise.program.decisions import Decision, Decisions
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["decide", "decision_of"]


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
    graph = problem.graph
    with_sizes, without = (graph.digests(graph.calls, depth, sizes=sizes) for sizes in (True, False))
    exact: dict[int, dict[Decision, list[int]]] = {}
    loose: dict[int, dict[Decision, list[int]]] = {}
    left = {digest for sizes in (True, False) for digest in graph.digests(graph.dead, depth, sizes=sizes)}
    for place, digests in enumerate(zip(with_sizes, without, strict=True)):
        if problem.choices[place].problem is None:
            left.update(digests)
            continue
        decision = decision_of(problem, assignment, place)
        for table, digest in zip((exact, loose), digests, strict=True):
            table.setdefault(digest, {}).setdefault(decision, []).append(place)
    torn = {}
    for digest, by in exact.items():
        sources = [decision.sources for decision in by]
        if len(set(sources)) < len(sources):
            torn[digest] = sorted(p for places in by.values() for p in places)

    def ranked(by: Mapping[Decision, list[int]]) -> tuple[Decision, ...]:
        order = sorted(by, key=lambda d: (-len(by[d]), by[d][0]))
        return tuple({d.sources: d for d in reversed(order)}[s] for s in dict.fromkeys(d.sources for d in order))

    shape = tuple(graph.mesh.shape)
    of_exact, of_loose = ({digest: ranked(by) for digest, by in table.items()} for table in (exact, loose))
    return Decisions(shape, of_exact, of_loose, depth, frozenset(left)), torn
