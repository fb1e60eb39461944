"""What a rank holds at each call of a step: what is alive there, and what the call needs while it runs.

A tensor is alive from the call that makes it to the last one that uses it, in the layout in which it rests. While a
call runs there are also the operands that were moved for it, and its results before they are moved. Parameters and the
optimizer's states are alive all the time, a gradient from where it is made to the end. So are the result of the step
and the gradient that its backward pass starts from, which the last call of forward takes and makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from shardwise.program.step_graph import Places

if TYPE_CHECKING:
    from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["StepMoments"]

Bytes = NDArray[np.int64]


@define(eq=False)
class StepMoments:
    """The calls of a step as moments; each has the bytes that a rank holds then."""

    problem: StepProblem
    #: By tensor, the last call that uses it, or a view of it.
    _last: dict[int, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        graph = self.problem.graph
        for t, uses in graph.uses.items():
            last = max(place for place, _ in uses)
            for one in graph.sharing(t):
                self._last[one] = max(last, self._last.get(one, last))
        forward = [call for call in graph.calls if call.phase == "forward"]
        ends = (*forward[-1].operands, *forward[-1].results) if len(forward) < len(graph.calls) and forward else ()
        self._last.update({one: len(graph.calls) for t in ends if t is not None for one in graph.sharing(t)})

    def held(self, assignment: Assignment) -> Bytes:
        """By call, the bytes that a rank holds while it runs."""
        problem, graph = self.problem, self.problem.graph
        here = np.zeros(len(graph.calls) + 1, np.int64)
        change = np.zeros(len(graph.calls) + 2, np.int64)
        change[0] = self._always(assignment)
        for place, call in enumerate(graph.calls):
            moved = set()
            for i, t in enumerate(call.operands):
                if t is not None:
                    used = problem.used(assignment, place, i)
                    if used != problem.rests(assignment, t):
                        moved.add(i)
                        here[place] += self._bytes(t, used)
            for t in call.results:
                if t is None:
                    continue
                made, rests = problem.made(assignment, t), problem.rests(assignment, t)
                is_new = t not in graph.viewed or graph.viewed[t][1] in moved
                if made != rests and is_new:
                    here[place] += self._bytes(t, made)
                last = self._last.get(t, place)
                for sink in graph.ends.get(t, ()):
                    target = problem.target(assignment, sink)
                    if sink.leaf is None or sink.stays:
                        continue
                    if target != rests:
                        change[place] += self._bytes(t, target)
                    else:
                        last = len(graph.calls)
                if made != rests or is_new:
                    change[place] += self._bytes(t, rests)
                    change[last + 1] -= self._bytes(t, rests)
        held: Bytes = np.cumsum(change)[:-1] + here
        return held

    def peak(self, assignment: Assignment) -> int:
        """The most bytes that a rank holds at a time."""
        return self.peak_and_place(assignment)[0]

    def peak_and_place(self, assignment: Assignment) -> tuple[int, int | None]:
        """The most bytes that a rank holds at a time, and the call that then runs; None at the end of the step."""
        held = self.held(assignment)
        place = int(held.argmax())
        return int(held[place]), place if place < len(held) - 1 else None

    def _always(self, assignment: Assignment) -> int:
        """The bytes of what no call makes: inputs, and parameters with the optimizer's states."""
        problem, memory = self.problem, self.problem.memory
        assert memory is not None
        total = 0
        for node in problem.graph.tensors:
            t = node.number
            if node.maker is None and node.root == t and t in problem.graph.uses:
                layout = problem.rests(assignment, t)
                times = memory.state - 1 if t in memory.parameters else 1
                total += int(self._bytes(t, layout) * times)
        return total

    def _bytes(self, t: int, layout: Places) -> int:
        memory = self.problem.memory
        assert memory is not None
        return memory.local(t, layout)
