"""The layers of a step: which of its calls and tensors belong to which of many equal modules.

Layers are found by the numbers in the names of modules: ``blocks.17.attention`` is in layer 17. Where modules take
turns, as those with and without experts, so many together are one layer.
"""

from __future__ import annotations

import re
from collections import defaultdict

from attrs import define, field

from shardwise.program.step_graph import CallNode, StepGraph

__all__ = ["StepLayers", "starred"]

_NUMBERED = re.compile(r"(.*?)\.?(\d+)(?:\.|$)(.*)")


@define(eq=False)
class StepLayers:
    """Which layer calls and tensors are in, and where in it. A layer has ``period`` modules."""

    graph: StepGraph
    period: int = 1
    #: By layer, the indices of its calls.
    calls: dict[int, list[int]] = field(factory=lambda: defaultdict(list), init=False)
    #: By index of a call that is in a layer, that layer, and which of its calls it is.
    of_call: dict[int, tuple[int, int]] = field(factory=dict, init=False)
    _prefix: str = field(default="", init=False)
    _leaves: dict[str, int] = field(factory=dict, init=False)
    _made: dict[int, tuple[int, int]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        numbers: dict[str, set[int]] = defaultdict(set)
        for call in self.graph.calls:
            if match := _NUMBERED.fullmatch(call.module):
                numbers[match[1]].add(int(match[2]))
        self._prefix = max(sorted(numbers), key=lambda prefix: len(numbers[prefix]), default="")
        for place, call in enumerate(self.graph.calls):
            layer = self._number(call.module)
            layer = self._of_moved(call) if not call.module else layer
            if layer is not None:
                self.of_call[place] = layer, len(self.calls[layer])
                self.calls[layer].append(place)
            self._made.update({t: (place, k) for k, t in enumerate(call.results) if t is not None})
        self._leaves = {t.name: t.number for t in self.graph.tensors if t.name and t.maker is None}

    def _number(self, name: str) -> int | None:
        """The layer that a name is in. Names of parameters begin at the module that was placed, so they are shorter."""
        match = _NUMBERED.fullmatch(name)
        return int(match[2]) // self.period if match and f".{self._prefix}".endswith(f".{match[1]}") else None

    def in_any(self, name: str) -> str:
        """A name as it is in each layer: without its numbers, but for which module of its layer it is in."""
        match = _NUMBERED.fullmatch(name) if self.period > 1 else None
        return starred(name) if match is None else f"{int(match[2]) % self.period} {starred(name)}"

    def _of_moved(self, call: CallNode) -> int | None:
        """The layer that makes what a call of no module finds moved: autograd detaches gradients that were moved to
        where their parameters lie.
        """
        moved = [self.graph.moved[t] for t in call.operands if t in self.graph.moved]
        return next((layer for t in moved if (layer := self.of_tensor(t)) is not None), None)

    @property
    def are_alike(self) -> bool:
        """Whether there are layers from 0 on that call the same ops on the same sizes, but for the first and last."""
        count = len(self.calls)
        inner = [self._looks(layer) for layer in range(1, count - 1) if layer in self.calls]
        return sorted(self.calls) == list(range(count)) and all(looks == inner[0] for looks in inner)

    def _looks(self, layer: int) -> list[object]:
        calls = [self.graph.calls[place] for place in self.calls[layer]]
        return [(call.schema.op, call.phase, self._sides(call), self.in_any(call.module)) for call in calls]

    def _sides(self, call: CallNode) -> tuple[object, ...]:
        """Sizes and dtypes of operands and results, and where parameters lie."""
        nodes = [None if t is None else self.graph.tensors[t] for t in (*call.operands, *call.results)]
        return tuple(
            None if node is None else (node.spec.tensor_meta, node.spec.placements if node.maker is None else None)
            for node in nodes
        )

    def of_tensor(self, t: int) -> int | None:
        """The layer of a tensor: that of its maker, or of its name."""
        if t in self._made:
            known = self.of_call.get(self._made[t][0])
            return None if known is None else known[0]
        node = self.graph.tensors[t]
        return self._number(node.name) if node.maker is None and node.name else None

    def in_layer(self, t: int, layer: int) -> int | None:
        """The tensor of another layer that is as this one; None if it has none."""
        if t in self._made:
            place, k = self._made[t]
            at = self.of_call[place][1]
            calls = self.calls[layer]
            return self.graph.calls[calls[at]].results[k] if at < len(calls) else None
        match = _NUMBERED.fullmatch(self.graph.tensors[t].name)
        assert match is not None
        start, end = match.span(2)
        name = self.graph.tensors[t].name
        number = layer * self.period + int(match[2]) % self.period
        return self._leaves.get(f"{name[:start]}{number}{name[end:]}")


def starred(name: str) -> str:
    """A name with its numbers taken out."""
    return re.sub(r"\d+", "*", name)
