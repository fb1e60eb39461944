"""What a rank keeps in a step: the state of the parameters, and what the forward pass leaves for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from attrs import define, field

from shardwise.kernel.placements import shard_dim
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.program.step_graph import Places, StepGraph

__all__ = ["StepMemory", "local_bytes"]


def local_bytes(meta: TensorMeta, layout: Places, mesh_shape: Sequence[int]) -> int:
    """Bytes of the largest part of a tensor."""
    shape = list(meta.shape)
    for p, n in zip(layout, mesh_shape, strict=True):
        dim = shard_dim(p)
        if dim is not None:
            shape[dim] = -(-shape[dim] // n)
    return math.prod(shape) * meta.dtype.itemsize


@define(eq=False)
class StepMemory:
    """The memory of a step on one rank: what is alive in all of it, and what forward leaves for backward.

    ``state`` is the bytes of a parameter with its gradient and its optimizer's states, over those of the parameter.
    Other tensors count that are made in forward and used in backward. Views count as the tensor that they are of, and
    those of an operand that was moved for them as that copy, too.
    """

    graph: StepGraph
    state: Fraction
    #: The tensors that count, by number, with what their bytes are multiplied by.
    kept: dict[int, Fraction] = field(init=False)
    #: Operands, as (index of the call, operand), of which a view is kept: where they are moved, the copy is.
    copies: frozenset[tuple[int, int]] = field(init=False)
    #: The parameters with a gradient.
    parameters: frozenset[int] = field(init=False)
    _known: dict[object, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        graph = self.graph
        tensors = graph.tensors
        made = {t for call in graph.calls if call.phase == "forward" for t in call.results if t is not None}
        used = {
            tensors[t].root for call in graph.calls if call.phase == "backward" for t in call.operands if t is not None
        }
        kept = [t for t in sorted(used) if t in made]
        parameters = sorted({s.leaf for s in graph.sinks if s.leaf is not None and tensors[s.leaf].root == s.leaf})
        self.parameters = frozenset(parameters)
        later = [t for call in graph.calls if call.phase == "backward" for t in call.operands if t is not None]
        views = {one for t in dict.fromkeys(later) for one in graph.sharing(t) if one in made and one in graph.viewed}
        self.copies = frozenset(graph.viewed[t] for t in views)
        self.kept = {**dict.fromkeys(kept, Fraction(1)), **dict.fromkeys(parameters, self.state)}

    def after_forward(self) -> StepMemory:
        """The same, where what is alive when forward has ended counts alone: there are no gradients yet."""
        new = StepMemory(self.graph, self.state)
        new.kept = {t: times - (t in self.parameters) for t, times in self.kept.items()}
        return new

    def after_backward(self) -> StepMemory:
        """The same, where what is alive when backward has ended counts alone."""
        new = StepMemory(self.graph, self.state)
        new.kept = dict.fromkeys(sorted(self.parameters), self.state)
        new.copies = frozenset()
        return new

    def kept_bytes(self, tensor: int, layout: Places) -> int:
        """What a rank keeps of a tensor that lies so."""
        times = self.kept.get(tensor)
        return 0 if times is None else int(self.local(tensor, layout) * times)

    def copied_bytes(self, place: int, operand: int, src: Places, dst: Places) -> int:
        """What a rank keeps of the copy that is made of an operand to bring it to a call."""
        if src == dst or (place, operand) not in self.copies:
            return 0
        t = self.graph.calls[place].operands[operand]
        assert t is not None
        return self.local(t, dst)

    def local(self, tensor: int, layout: Places) -> int:
        """The bytes of a rank's part of a tensor that lies so."""
        spec = self.graph.tensors[tensor].spec
        key = (spec.tensor_meta, layout)
        nbytes = self._known.get(key)
        if nbytes is None:
            nbytes = self._known[key] = local_bytes(spec.tensor_meta, layout, spec.mesh_shape)
        return nbytes
