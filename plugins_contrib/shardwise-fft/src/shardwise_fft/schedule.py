"""Which steps bring a call from the layout of its operand to that of its result; worked out once per plan.

Dims that are whole are transformed at once. Then each sharded one in turn: by a swap with the dim that is to be sharded
in its place, where the result wants that and that dim is done; else along its shards. What is then still not where the
result wants it is swapped, or in the last resort gathered and cut. The steps depend on specs alone: all ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from attrs import define, field

from shardwise.placements import Placement, Shard
from shardwise.rule import LocalCall
from shardwise.spec import chunk
from shardwise_fft.four_step import FourStep, factors
from shardwise_fft.kernels import Kernel, Stage, stages
from shardwise_fft.steps import Along, Compute, Gather, Place, Step, Swap

__all__ = ["schedule"]

# Per mesh dim, the tensor dim that it shards.
Layout = tuple[int | None, ...]


def schedule(local: LocalCall) -> tuple[Step, ...] | None:
    """The steps of a call on its specs; ``None`` where each rank runs the whole op on what it has."""
    source, result = local.inputs[0], local.outputs[0]
    assert source is not None
    assert result is not None
    before, after = _layout(source.placements), _layout(result.placements)
    parts = stages(local.call)
    transformed = {d for part in parts for d in part.dims}
    if before == after and not transformed & set(before):
        return None
    course = _Course(before, after, tuple(source.shape), source.mesh_shape)
    for i, part in enumerate(parts):
        later = {d for other in parts[i + 1 :] for d in other.dims}
        course.transform(part, later)
    course.settle()
    return tuple(course.steps)


def _layout(placements: Iterable[Placement]) -> Layout:
    return tuple(p.dim if isinstance(p, Shard) else None for p in placements)


def _splits(layout: Layout, dim: int) -> tuple[int, ...]:
    """The mesh dims that shard a dim, outermost first."""
    return tuple(m for m, d in enumerate(layout) if d == dim)


def _moved(layout: Layout, mesh_dim: int, dim: int | None) -> Layout:
    return (*layout[:mesh_dim], dim, *layout[mesh_dim + 1 :])


@define(eq=False)
class _Course:
    """The layout so far on the way to ``goal``, and the steps that led there. ``sizes`` are the operand's."""

    layout: Layout
    goal: Layout
    sizes: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    steps: list[Step] = field(factory=list, init=False)

    def transform(self, stage: Stage, later: set[int]) -> None:
        """Transform all dims of a stage; those of later ones must stay as they are."""
        todo = list(stage.dims)
        while todo:
            whole = [d for d in todo if not _splits(self.layout, d)]
            if whole:
                self.steps.append(Compute(tuple(whole), stage.kernel))
                todo = [d for d in todo if d not in whole]
                continue
            undone = later.union(todo)
            free = [d for d in todo if self._freeing(d, undone) is not None]
            d = min(free or todo, key=lambda d: _splits(self.layout, d))
            freeing = self._freeing(d, undone) or self._detour(d, undone)
            if freeing is None:
                self.steps.append(self._along(d, stage.kernel))
                todo.remove(d)
            else:
                self._take(freeing)

    def _along(self, dim: int, kernel: Kernel) -> Step:
        """A dim on its shards: by its lines, or together where no rank would get one of them."""
        split = _splits(self.layout, dim)
        ranks = self.mesh_shape[split[0]]
        if len(split) == 1 and self._most_lines(dim) < ranks:
            by = factors(self.sizes[dim], ranks, kernel)
            if by is not None:
                return FourStep(dim, split[0], kernel, by)
        return Along(dim, split, kernel)

    def _most_lines(self, dim: int) -> int:
        """The lines along a dim on the rank that has most."""
        sizes = list(self.sizes)
        for mesh_dim, d in enumerate(self.layout):
            if d is not None:
                sizes[d] = chunk(sizes[d], self.mesh_shape[mesh_dim], 0)[0]
        return math.prod(n for d, n in enumerate(sizes) if d != dim)

    def _freeing(self, dim: int, undone: set[int]) -> list[Swap | Gather] | None:
        """The moves that make a dim whole on the way to the goal, if there are such."""
        found: list[Swap | Gather] = []
        layout = self.layout
        for mesh_dim in reversed(_splits(layout, dim)):
            step = self._move(layout, mesh_dim, undone)
            if step is None:
                return None
            found.append(step)
            layout = _moved(layout, mesh_dim, self.goal[mesh_dim])
        return found

    def _detour(self, dim: int, undone: set[int]) -> list[Swap | Gather] | None:
        """A swap with a third dim where the goal's own is not done yet: two moves; ``Along`` would take three."""
        split = _splits(self.layout, dim)
        if len(split) != 1 or self.goal[split[0]] in (dim, None):
            return None
        taken = {dim, self.goal[split[0]], *self.layout}
        by_way_of = sorted(undone - taken)
        return [Swap(split[0], dim, by_way_of[0])] if by_way_of else None

    def _move(self, layout: Layout, mesh_dim: int, undone: Collection[int | None]) -> Swap | Gather | None:
        """One move of a mesh dim to its goal, if one collective does it: it must be the innermost before and after."""
        dim, into = layout[mesh_dim], self.goal[mesh_dim]
        if dim is None or dim == into or into in undone or _splits(layout, dim)[-1] != mesh_dim:
            return None
        if into is None:
            return Gather(mesh_dim, dim)
        inner = any(m > mesh_dim for m in _splits(layout, into))
        return None if inner else Swap(mesh_dim, dim, into)

    def _take(self, steps: Sequence[Swap | Gather]) -> None:
        for step in steps:
            self.steps.append(step)
            self.layout = _moved(self.layout, step.mesh_dim, step.into if isinstance(step, Swap) else None)

    def settle(self) -> None:
        """Bring what is left to the goal."""
        while (step := self._any_move()) is not None:
            self._take([step])
        wrong = {m for m, (d, e) in enumerate(zip(self.layout, self.goal, strict=True)) if d != e}
        dims = {d for m in wrong for d in (self.layout[m], self.goal[m]) if d is not None}
        if not dims:
            return
        for mesh_dim in reversed(range(len(self.layout))):
            d = self.layout[mesh_dim]
            if d in dims:
                self.steps.append(Gather(mesh_dim, d))
        self.steps.append(Place(tuple(sorted(dims))))
        self.layout = self.goal

    def _any_move(self) -> Swap | Gather | None:
        found = (self._move(self.layout, m, ()) for m in reversed(range(len(self.layout))))
        return next((step for step in found if step is not None), None)
