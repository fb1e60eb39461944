"""A step of many equal layers, shortened to some of them, and its assignment for all of them.

What is best for one layer in the middle is as a rule best for the next one. So a long step is solved with the first and
the last layers alone, and each layer that was left out does as the last one of the first ones.

What the calls of a layer that is kept take from one that is left out they take from the layer that stands in its
place: a layer behind the gap from the last one before it, and, backward, a layer before the gap from the first one
behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from shardwise.program.step_graph import StepGraph
from shardwise.program.step_layers import StepLayers
from shardwise.program.step_moments import RUNNING
from shardwise.program.step_problem import Assignment

__all__ = ["ShortStep", "shortened"]

_KEPT = 3  # layers at either end: what only the first and the last do is one or two layers long
_LEAST_LAYERS = 12  # of a step that is worth it
_LONGEST_PERIOD = 6  # modules that take turns: one with global attention after five with local


@frozen(eq=False)
class ShortStep:
    """A shortened step.

    ``places`` are the indices of its calls among all, and ``stands_in`` is, by index of a call of the whole step, the
    index among its own calls. ``tensors`` has the tensor that stands in for one that is left out. ``layers`` has the
    layer of each call of the whole step, and ``tensor_layers`` that of each tensor; None outside of layers.
    ``of_whole`` are the layers of the whole step.
    """

    graph: StepGraph
    places: list[int]
    stands_in: list[int]
    tensors: Mapping[int, int]
    layers: list[int | None]
    tensor_layers: list[int | None]
    of_whole: StepLayers

    @property
    def count(self) -> int:
        """How many layers the whole step has."""
        return 1 + max(layer for layer in self.layers if layer is not None)

    @property
    def gap(self) -> range:
        """The layers that are left out. The one before them stands for each."""
        return _gap(self.count)

    def mixed(self, first: Assignment, then: Assignment, layers: int) -> Assignment:
        """An assignment of the whole step that does in some first layers as one, and elsewhere as another."""
        mixed = then.copy()
        for place, layer in enumerate(self.layers):
            if layer is not None and layer < layers:
                mixed.rows[place] = list(first.rows[place])
        for t in mixed.rests:
            layer = self.tensor_layers[t]
            if layer is not None and layer < layers:
                mixed.rests[t] = first.rests[t]
        return mixed

    def means(self, life: int, each: Sequence[int]) -> list[int]:
        """By call or tensor of this step, the mean of what all have that it stands for in the whole one."""
        stands_in = self.stands_in if life == RUNNING else [self.tensors.get(t, t) for t in range(len(each))]
        count = len(self.places) if life == RUNNING else len(each)
        total, times = [0] * count, [0] * count
        for own, at in zip(each, stands_in, strict=True):
            total[at] += own
            times[at] += 1
        return [of // max(1, n) for of, n in zip(total, times, strict=True)]

    def part_of(self, assignment: Assignment, resting: frozenset[int]) -> Assignment:
        """An assignment of the whole step for this one, whose tensors that rest are given."""
        rows = [list(assignment.rows[place]) for place in self.places]
        return Assignment(rows, {t: assignment.rests[t] for t in resting})

    def whole(self, short: Assignment, like: Assignment) -> Assignment:
        """An assignment of the whole step, from one of this one; it has the tensors that rest in ``like``."""
        rows = [list(short.rows[place]) for place in self.stands_in]
        rests = {t: short.rests.get(self.tensors.get(t, t), at) for t, at in like.rests.items()}
        return Assignment(rows, rests)


def shortened(graph: StepGraph) -> ShortStep | None:
    """The step with the first and the last layers alone; None where its layers are few, or are not alike."""
    layers = _alike_layers(graph)
    if layers is None:
        return None
    count = len(layers.calls)
    gap = _gap(count)
    tensors = _stand_ins(layers, gap)
    places = [p for p in range(len(graph.calls)) if p not in layers.of_call or layers.of_call[p][0] not in gap]
    calls = []
    for place in places:
        layer = layers.of_call.get(place, (None,))[0]
        operands = _operands(layers, graph.calls[place].operands, layer, gap)
        if operands is None:
            return None
        calls.append(evolve(graph.calls[place], operands=operands))
    # A gradient may be made among the calls of the next layer: that of the last layer before the gap is then the one
    # that the first layer behind it makes.
    sinks = tuple(
        evolve(sink, leaf=None if sink.leaf is None else tensors.get(sink.leaf, sink.leaf))
        for sink in graph.sinks
        if layers.of_tensor(sink.tensor) not in gap
    )
    nodes = tuple(evolve(node, root=tensors.get(node.root, node.root)) for node in graph.tensors)
    index = {place: k for k, place in enumerate(places)}
    stands_in = []
    for place in range(len(graph.calls)):
        layer, at = layers.of_call.get(place, (None, 0))
        stands_in.append(index[layers.calls[gap.start - 1][at] if layer is not None and layer in gap else place])
    short = evolve(graph, calls=tuple(calls), tensors=nodes, sinks=sinks)
    of_calls = [layers.of_call.get(place, (None, 0))[0] for place in range(len(graph.calls))]
    of_tensors = [layers.of_tensor(node.number) for node in graph.tensors]
    return ShortStep(short, places, stands_in, tensors, of_calls, of_tensors, layers)


def _gap(count: int) -> range:
    return range(_KEPT, count - _KEPT)


def _alike_layers(graph: StepGraph) -> StepLayers | None:
    """The layers of a step that has many, of as few modules as make them alike."""
    for period in range(1, _LONGEST_PERIOD + 1):
        layers = StepLayers(graph, period)
        if len(layers.calls) < _LEAST_LAYERS:
            break
        if layers.are_alike:
            return layers
    return None


def _operands(
    layers: StepLayers, operands: Sequence[int | None], layer: int | None, gap: range
) -> tuple[int | None, ...] | None:
    """Operands of a call with those in the gap replaced; None where one cannot be."""
    new: list[int | None] = []
    for t in operands:
        of = None if t is None else layers.of_tensor(t)
        if t is None or of is None or of not in gap:
            new.append(t)
            continue
        # What comes after the layers takes from the last ones, and what comes before them, backward, from the first.
        behind = layer >= gap.stop if layer is not None else of == gap.stop - 1
        other = layers.in_layer(t, of - len(gap) if behind else of + len(gap))
        if other is None or (layer is None and of not in (gap.start, gap.stop - 1)):
            return None
        new.append(other)
    return tuple(new)


def _stand_ins(layers: StepLayers, gap: range) -> dict[int, int]:
    """By tensor of the gap, that of the last layer before it."""
    of = {node.number: layers.of_tensor(node.number) for node in layers.graph.tensors}
    found = {t: layers.in_layer(t, gap.start - 1) for t, layer in of.items() if layer is not None and layer in gap}
    return {t: other for t, other in found.items() if other is not None}
