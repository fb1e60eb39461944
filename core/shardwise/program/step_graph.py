"""A recorded step: its calls, the tensors between them, and what the program fixes about layouts.

Layouts play no part in which rows a call has, so one recording serves every placement of activations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from attrs import evolve, field, frozen

from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import Placement
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tags import DEPTH, Tag, call_digest, tag_of_name, tag_of_result

__all__ = ["CallNode", "Places", "Sink", "StepGraph", "TensorNode"]

Places = tuple[Placement, ...]


@frozen(eq=False)
class TensorNode:
    """A tensor of the step.

    ``spec`` is how it lay when it was recorded. ``maker`` is the call that made it, and None for a leaf, an input, or
    what the program took from elsewhere. ``name`` is a parameter's or buffer's qualified name, or empty. ``root`` is
    the first tensor whose memory it shares, itself if it has its own.
    """

    number: int
    spec: TensorSpec
    maker: int | None
    root: int
    name: str = ""


@frozen(eq=False)
class CallNode:
    """A call of an op by a rule. ``operands`` and ``results`` are tensor numbers, flat as in specs; None where absent.

    ``strategies`` are those that ran. ``module`` is the path of the module that made the call, or whose forward call
    it belongs to.
    """

    number: int
    entry: Entry
    schema: OpSchema
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    strategies: tuple[PlacementStrategy, ...]
    phase: str
    module: str = ""

    def __str__(self) -> str:
        return f"{op_name(self.schema.op)}" + (f" in {self.module}" if self.module else "")


@frozen(eq=False)
class Sink:
    """A layout that a tensor must reach: a gradient that of its leaf, a tensor that of an explicit ``redistribute``.

    With ``stays`` the tensor itself must rest there, because the program reads its local part. ``leaf`` is the leaf
    whose gradient it is: where that lies elsewhere, the gradient goes there. ``shared_by`` gradients of several
    backward passes are added up first, and each bears its share of the move.
    """

    tensor: int
    placements: Places
    stays: bool = False
    leaf: int | None = None
    shared_by: int = 1


@frozen(eq=False)
class StepGraph:
    """The calls of one step in order, its tensors by number, and its sinks. ``written`` are roots of memory that some
    call writes.
    """

    mesh: Mesh
    calls: tuple[CallNode, ...]
    tensors: tuple[TensorNode, ...]
    sinks: tuple[Sink, ...]
    written: frozenset[int]
    #: Calls that nobody needs: planning leaves them as they are.
    dead: tuple[CallNode, ...] = ()
    #: Tensor that an explicit redistribution made -> the tensor that it was.
    moved: dict[int, int] = field(factory=dict)
    _tags: dict[int, list[Tag | None]] = field(factory=dict, init=False)

    @cached_property
    def uses(self) -> dict[int, list[tuple[int, int]]]:
        """Per tensor, its uses: (index into ``calls``, operand)."""
        uses: dict[int, list[tuple[int, int]]] = {}
        for place, call in enumerate(self.calls):
            for i, t in enumerate(call.operands):
                if t is not None:
                    uses.setdefault(t, []).append((place, i))
        return uses

    @cached_property
    def ends(self) -> dict[int, list[Sink]]:
        """Per tensor, its sinks."""
        ends: dict[int, list[Sink]] = {}
        for sink in self.sinks:
            ends.setdefault(sink.tensor, []).append(sink)
        return ends

    @cached_property
    def viewed(self) -> dict[int, tuple[int, int]]:
        """Per view, the call (index into ``calls``) that makes it, and the operand whose memory it shares."""
        viewed = {}
        for place, call in enumerate(self.calls):
            roots = [None if t is None else self.tensors[t].root for t in call.operands]
            for t in call.results:
                if t is not None and self.tensors[t].root != t and self.tensors[t].root in roots:
                    viewed[t] = place, roots.index(self.tensors[t].root)
        return viewed

    def sharing(self, tensor: int) -> Iterator[int]:
        """A tensor, what it is a view of, what that is a view of, and so on."""
        at: int | None = tensor
        while at is not None:
            yield at
            place, i = self.viewed.get(at, (0, -1))
            at = None if i == -1 else self.calls[place].operands[i]

    @cached_property
    def made_by(self) -> dict[int, CallNode]:
        """Per tensor, the call that makes it."""
        return {t: call for call in self.calls for t in call.results if t is not None}

    def describe(self, tensor: int) -> str:
        """What people call a tensor, the same for those of all layers: a name, or the op that makes it."""
        name, maker = self.tensors[tensor].name, self.made_by.get(tensor)
        return re.sub(r"\d+", "*", name or (f"results of {maker}" if maker is not None else "inputs"))

    def without_dead_calls(self) -> StepGraph:
        """The same step without calls whose results nobody uses and that write nothing: planning probes such calls."""
        wanted = {sink.tensor for sink in self.sinks}
        alive: list[CallNode] = []
        dead: list[CallNode] = []
        for call in reversed(self.calls):
            results = [t for t in call.results if t is not None]
            if call.schema.written or any(t in wanted for t in results):
                alive.append(call)
                wanted.update(t for t in call.operands if t is not None)
                wanted.update(self.moved[t] for t in call.operands if t in self.moved)
            else:
                dead.append(call)
        return evolve(self, calls=tuple(reversed(alive)), dead=tuple(reversed(dead)))

    def tags(self, depth: int = DEPTH) -> list[Tag | None]:
        """The tag of every tensor, as a run by decisions gives them."""
        known = self._tags.get(depth)
        if known is None:
            known = self._tags[depth] = self._tags_of(depth)
        return known

    def _tags_of(self, depth: int) -> list[Tag | None]:
        tags: list[Tag | None] = [None] * len(self.tensors)
        made = {t: (call, i) for call in (*self.calls, *self.dead) for i, t in enumerate(call.results) if t is not None}
        alike: dict[tuple[object, ...], Tag] = {}  # equal layers have equal tags
        for node in self.tensors:
            if node.number in self.moved:
                tags[node.number] = tags[self.moved[node.number]]
            elif node.number in made:
                call, i = made[node.number]
                operands = [None if t is None else tags[t] for t in call.operands]
                same = call.schema.returned(len(call.results))[i]
                if same is not None:
                    tags[node.number] = operands[same]
                    continue
                key = (id(call.schema), i, *operands)
                if key not in alike:
                    alike[key] = tag_of_result(call.schema, operands, i, depth)
                tags[node.number] = alike[key]
            else:
                # What an earlier step made, as a state that goes from step to step, has the tag of that result.
                tags[node.number] = tag_of_name(node.name, depth) if node.name else node.spec.tag
        return tags

    def digests(self, calls: Sequence[CallNode], depth: int = DEPTH, *, sizes: bool) -> list[int]:
        """By what a run by decisions knows calls of this step, with their sizes or without them."""
        tags = self.tags(depth)
        known: dict[tuple[object, ...], int] = {}
        digests = []
        for call in calls:
            of = [None if t is None else tags[t] for t in call.operands]
            key = (id(call.schema), *of)
            if key not in known:
                known[key] = call_digest(call.schema, of, sizes=sizes)
            digests.append(known[key])
        return digests
