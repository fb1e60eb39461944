"""The cost and the bytes of a step of many equal layers: what layers that do the same cost is counted once.

Two layers cost the same where their calls are connected in the same way, and where they, and the layers that they are
connected to, have the same rows and layouts. That is looked at for each assignment anew, so what is counted is exact,
whatever the assignment is.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from shardwise.program.step_layers import StepLayers
from shardwise.program.step_moments import RUNNING

if TYPE_CHECKING:
    from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["LayerFold"]


@frozen(eq=False)
class _Layer:
    """A layer: the indices of its calls, its tensors that rest, and a number that layers of one structure share."""

    calls: list[int]
    rests: list[int]
    structure: int


@define(eq=False)
class LayerFold:
    """The layers of a problem's step. Layers in a *group* do the same under an assignment."""

    problem: StepProblem
    layers: StepLayers
    _layers: list[_Layer] = field(init=False)
    _outside: list[int] = field(init=False)
    #: How many layers away the tensors are at most that a layer's calls use.
    _reach: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        of_layers, graph = self.layers, self.problem.graph
        self._outside = [place for place in range(len(graph.calls)) if place not in of_layers.of_call]
        resting: dict[int, list[tuple[str, int]]] = {}
        for t in self.problem.resting:
            layer = of_layers.of_tensor(t)
            if layer is not None:
                resting.setdefault(layer, []).append((str(self._link(t, layer)), t))
        numbers: dict[Hashable, int] = {}
        self._layers = []
        for layer, calls in sorted(of_layers.calls.items()):
            rests = sorted(resting.get(layer, ()))
            looks = (tuple(self._looks(place, layer) for place in calls), tuple(name for name, _ in rests))
            self._layers.append(_Layer(calls, [t for _, t in rests], numbers.setdefault(looks, len(numbers))))

    def cost_of_calls(self, assignment: Assignment) -> int:
        """Nanoseconds of all calls, with the moves of their operands and results."""
        cost = self.problem.cost_of_call
        total = sum(cost(assignment, place) for place in self._outside)
        for group in self._groups(assignment):
            total += len(group) * sum(cost(assignment, place) for place in group[0].calls)
        return total

    def changes(self, assignment: Assignment) -> NDArray[np.int64]:
        """By moment, the bytes of all calls that are held from then on, less those that no longer are."""
        moments = self.problem.moments
        changes = moments.changes(part for place in self._outside for part in moments.of_call(assignment, place))
        for group in self._groups(assignment):
            for n, place in enumerate(group[0].calls):
                for life, number, nbytes in moments.of_call(assignment, place):
                    numbers = self._numbers(group, n, life, number)
                    starts, stops = moments.span_arrays[life]
                    np.add.at(changes, starts[numbers], nbytes)
                    np.subtract.at(changes, stops[numbers], nbytes)
        return changes

    def _groups(self, assignment: Assignment) -> list[list[_Layer]]:
        """The layers, grouped by what they and those around them do."""
        numbers: dict[Hashable, int] = {}
        states = []
        for layer in self._layers:
            rows = tuple(tuple(assignment.rows[place]) for place in layer.calls)
            state = (layer.structure, rows, tuple(assignment.rests[t] for t in layer.rests))
            states.append(numbers.setdefault(state, len(numbers)))
        around = [-1] * self._reach
        padded = [*around, *states, *around]
        groups: dict[tuple[int, ...], list[_Layer]] = {}
        for n, layer in enumerate(self._layers):
            groups.setdefault(tuple(padded[n : n + 2 * self._reach + 1]), []).append(layer)
        return list(groups.values())

    # -- what layers are made of ---------------------------------------------------------------------------------

    def _looks(self, place: int, layer: int) -> Hashable:
        """All that the cost and the bytes of a call depend on, but for rows and layouts."""
        problem, graph = self.problem, self.problem.graph
        call, choices = graph.calls[place], problem.choices[place]
        operands = tuple(
            None if t is None else (self._link(t, layer), *self._uses(place, i, t)) for i, t in enumerate(call.operands)
        )
        results = tuple(None if t is None else self._ends(t, layer) for t in call.results)
        # Equal calls have one object of choices, but for those that have no choice.
        rows = id(choices) if choices.problem is not None else (call.schema.key, choices.rows)
        return rows, operands, results

    def _link(self, t: int, layer: int) -> Hashable:
        """Where a tensor comes from, seen from a layer; two layers with equal links see the same."""
        graph, node = self.problem.graph, self.problem.graph.tensors[t]
        maker = self.problem.maker(t)
        if maker is None and t not in self.problem.resting:
            return node.spec.placements
        of = self.layers.of_tensor(t)
        if of is None:
            return t
        self._reach = max(self._reach, abs(of - layer))
        if maker is None:
            return of - layer, self.layers.in_any(node.name)
        place, k = maker
        return of - layer, self.layers.of_call[place][1], k, graph.calls[place].schema.op

    def _uses(self, place: int, i: int, t: int) -> tuple[Hashable, ...]:
        problem = self.problem
        call = problem.graph.calls[place]
        views = tuple(call.results.index(view) for view in problem.moments.views(place, i))
        is_copied = problem.memory is not None and (place, i) in problem.memory.copies
        return problem.graph.tensors[t].spec.tensor_meta, problem.must_stay(place, i), is_copied, views

    def _ends(self, t: int, layer: int) -> Hashable:
        problem, graph = self.problem, self.problem.graph
        sinks = tuple(
            (sink.placements, sink.stays, sink.shared_by, None if sink.leaf is None else self._link(sink.leaf, layer))
            for sink in graph.ends.get(t, ())
        )
        return graph.tensors[t].spec.tensor_meta, t in problem.resting, t in graph.viewed, sinks

    def _numbers(self, group: list[_Layer], n: int, life: int, number: int) -> list[int]:
        """The number of a call or of one of its results, in all layers of a group."""
        places = [layer.calls[n] for layer in group]
        if life == RUNNING:
            return places
        calls = self.problem.graph.calls
        k = calls[places[0]].results.index(number)
        numbers = [calls[place].results[k] for place in places]
        return [t for t in numbers if t is not None]
