"""What a step sends under an assignment, collective by collective, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import define, frozen

from shardwise.planning.cost import KINDS
from shardwise.planning.path import shortest_path
from shardwise.program.step_graph import Places
from shardwise.program.step_problem import Assignment, StepProblem
from shardwise.program.step_rows import as_placements
from shardwise.steps.costs import WorkCosts

__all__ = ["Sent", "sent_by"]


@frozen(order=True)
class Sent:
    """A collective of a step: for a result (``rests``), an operand (``moves``), a layout that the program asks for
    (``ends``) or inside a rule's lowering (``lowering``).
    """

    call: int
    purpose: str
    kind: str
    mesh_dims: tuple[int, ...]
    nbytes: int


@define
class _Listing:
    problem: StepProblem
    assignment: Assignment
    costs: WorkCosts

    def of_all(self) -> Iterator[Sent]:
        problem, assignment = self.problem, self.assignment
        for place, call in enumerate(problem.graph.calls):
            for i, t in enumerate(call.operands):
                if t is not None:
                    yield from self._path(
                        place, "moves", t, problem.rests(assignment, t), problem.used(assignment, place, i)
                    )
            rows = [problem.choices[place].rows[r] for r in assignment.rows[place]]
            for one in self.costs.sent_by_lowering(call, rows):
                yield Sent(place, "lowering", one.kind, one.mesh_dims, one.nbytes)
            for t in call.results:
                if t is None:
                    continue
                rests = problem.rests(assignment, t)
                yield from self._path(place, "rests", t, problem.made(assignment, t), rests)
                for sink in problem.graph.ends.get(t, ()):
                    if not sink.stays:
                        yield from self._path(place, "ends", t, rests, problem.target(assignment, sink))

    def _path(self, place: int, purpose: str, tensor: int, src: Places, dst: Places) -> Iterator[Sent]:
        if src == dst:
            return
        spec = self.problem.graph.tensors[tensor].spec.untagged
        shape = spec.mesh_shape
        ends = (spec.with_placements(as_placements(layout, shape)) for layout in (src, dst))
        for step in shortest_path(*ends).steps:
            if step.kind in KINDS and step.held:
                yield Sent(place, purpose, step.kind, step.mesh_dims, step.held)


def sent_by(problem: StepProblem, assignment: Assignment, costs: WorkCosts) -> Counter[Sent]:
    """The collectives of a step, and how often each runs."""
    return Counter(_Listing(problem, assignment, costs).of_all())
