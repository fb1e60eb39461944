"""What a rank holds at least in a step, whatever its plan: known without a search.

Each tensor that is alive at a moment lies there in some layout. The one with the fewest bytes shards it over all ranks,
as far as its dims go. Only what is fixed lies elsewhere. All of these together are a bound that no plan undercuts; what
a call needs beside them while it runs is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attrs import define, field, frozen

from shardwise.kernel.placements import REPLICATE, Shard
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.program.step_graph import Places
from shardwise.program.step_memory import local_bytes
from shardwise.program.step_moments import ALIVE, BEYOND, Part
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["Least", "LeastMemory"]


@frozen
class Least:
    """The most bytes that a rank holds at least at a time; the call that runs then, if any, and how many of them its
    operands and results have; and the bytes of what is kept for later, by what people call it.
    """

    nbytes: int
    place: int | None
    running: int
    kept: dict[str, int]


@define(eq=False)
class LeastMemory:
    """The bound for a problem; ``start`` has the layouts of what is fixed, or pinned."""

    problem: StepProblem
    start: Assignment
    _known: dict[TensorMeta, Places] = field(factory=dict, init=False)

    def found(self) -> Least:
        """The bound, at the moment where it is highest."""
        problem, moments = self.problem, self.problem.moments
        parts = list(self._parts())
        held = moments.held_by(parts)
        at = int(held.argmax())
        here: dict[int, int] = {}
        for life, t, nbytes in parts:
            starts, stops = moments.span_arrays[life]
            if starts[t] <= at < stops[t]:
                here[t] = here.get(t, 0) + nbytes
        kept: dict[str, int] = {}
        for t, nbytes in here.items():
            if problem.memory is not None and t in problem.memory.kept:
                what = problem.graph.describe(t)
                kept[what] = kept.get(what, 0) + nbytes
        if at == len(problem.graph.calls):
            return Least(int(held[at]), None, 0, kept)
        call = problem.graph.calls[at]
        roots = {problem.graph.tensors[t].root for t in (*call.operands, *call.results) if t is not None}
        return Least(int(held[at]), at, sum(here.get(t, 0) for t in roots), kept)

    def _parts(self) -> Iterator[Part]:
        problem, moments = self.problem, self.problem.moments
        for node in problem.graph.tensors:
            if moments.is_leaf(node.number):
                yield from moments.of_leaf(node.number, self._lies(node.number))
        for call in problem.graph.calls:
            for t in call.results:
                if t is None:
                    continue
                if t not in problem.graph.viewed:
                    yield ALIVE, t, self._local(t, self._fewest(t))
                for sink in moments.gradients(t)[:1]:
                    is_free = sink.leaf is not None and sink.leaf in problem.free
                    target = self._lies(sink.leaf) if is_free and sink.leaf is not None else sink.placements
                    yield BEYOND, t, self._local(t, target)

    def _lies(self, leaf: int) -> Places:
        """Where an input or a parameter lies, or has the fewest bytes."""
        problem = self.problem
        is_free = leaf in problem.free and leaf not in problem.pinned
        return self._fewest(leaf) if is_free else problem.rests(self.start, leaf)

    def _local(self, t: int, layout: Places) -> int:
        memory = self.problem.memory
        assert memory is not None
        return memory.local(t, layout)

    def _fewest(self, t: int) -> Places:
        """The layout of a tensor with the fewest bytes on a rank."""
        spec = self.problem.graph.tensors[t].spec
        known = self._known.get(spec.tensor_meta)
        if known is None:
            each = [REPLICATE, *map(Shard, range(len(spec.shape)))]
            layouts = product(each, repeat=spec.mesh.ndim)
            known = min(layouts, key=lambda layout: local_bytes(spec.tensor_meta, layout, spec.mesh_shape))
            self._known[spec.tensor_meta] = known
        return known
