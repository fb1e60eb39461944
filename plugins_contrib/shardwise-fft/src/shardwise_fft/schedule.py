"""Which steps bring a call from the layout of its operand to that of its result; computed once per plan.

Whole dims are transformed at once. Then the sharded dims follow in turn. If the result shards another dim in place of a
sharded one, and that other dim is done, one swap makes the sharded dim whole. Else it is transformed along its shards.
At the end, mesh dims that do not yet lie as in the result are swapped, or as a last resort gathered and cut. The steps
depend on specs alone, so all ranks agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from attrs import define, field, frozen

from shardwise.rule import LocalCall, Placement, Shard, chunk
from shardwise_fft.four_step import FourStep, factors
from shardwise_fft.kernels import Kernel, Stage, stages
from shardwise_fft.ranks import Ranks, ranks_over
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
    course = _Course(before, after, list(source.shape), ranks_over(local, range(len(before))))
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


@frozen
class _Move:
    """Mesh dims that go from one dim, of which they are the innermost, to another or to none, by one collective."""

    mesh_dims: tuple[int, ...]
    dim: int
    into: int | None

    def moved(self, layout: Layout) -> Layout:
        return tuple(self.into if m in self.mesh_dims else d for m, d in enumerate(layout))


@define(eq=False)
class _Course:
    """The layout and the global sizes so far on the way to ``goal``, and the steps that led there.

    ``mesh`` are all ranks.
    """

    layout: Layout
    goal: Layout
    sizes: list[int]
    mesh: Ranks
    steps: list[Step] = field(factory=list, init=False)

    def transform(self, stage: Stage, later: set[int]) -> None:
        """Transform all dims of a stage; those of later ones must stay as they are."""
        todo = list(stage.dims)
        while todo:
            whole = [d for d in todo if not _splits(self.layout, d)]
            if whole:
                self.steps.append(Compute(tuple(whole), stage.kernel))
                self._resize(whole[-1], stage.kernel)
                todo = [d for d in todo if d not in whole]
                continue
            undone = later.union(todo)
            free = [d for d in todo if self._moves_to_goal(d, undone) is not None]
            d = min(free or todo, key=lambda d: _splits(self.layout, d))
            moves = self._moves_to_goal(d, undone) or self._detour(d, undone)
            if moves is None:
                self.steps.append(self._along(d, stage.kernel))
                self._resize(d, stage.kernel)
                todo.remove(d)
            else:
                self._apply(moves)

    def _resize(self, dim: int, kernel: Kernel) -> None:
        self.sizes[dim] = kernel.result_size(self.sizes[dim])

    def _along(self, dim: int, kernel: Kernel) -> Step:
        """The step for a dim that stays sharded: ranks share its lines, or each line if there are too few lines."""
        over = self._over(_splits(self.layout, dim))
        size = self.sizes[dim]
        if self._most_lines(dim) < over.count:
            by = factors(size, over.count, kernel)
            if by is not None:
                return FourStep(over, dim, kernel, by)
        return Along(over, dim, kernel, size)

    def _over(self, mesh_dims: Sequence[int]) -> Ranks:
        return Ranks(mesh_dims, [self.mesh.shape[m] for m in mesh_dims], [self.mesh.place[m] for m in mesh_dims])

    def _most_lines(self, dim: int) -> int:
        """The lines along a dim on the rank that has most."""
        sizes = list(self.sizes)
        for mesh_dim, d in enumerate(self.layout):
            if d is not None:
                sizes[d] = chunk(sizes[d], self.mesh.shape[mesh_dim], 0)[0]
        return math.prod(n for d, n in enumerate(sizes) if d != dim)

    # -- moves --

    def _moves_to_goal(self, dim: int, undone: set[int]) -> list[_Move] | None:
        """The moves to the goal that make a dim whole; ``None`` if one of them is not possible yet."""
        moves: list[_Move] = []
        layout = self.layout
        while _splits(layout, dim):
            move = self._move(layout, dim, undone)
            if move is None:
                return None
            moves.append(move)
            layout = move.moved(layout)
        return moves

    def _detour(self, dim: int, undone: set[int]) -> list[_Move] | None:
        """A swap with a third dim, if the goal's dim is not done yet: two moves in all; with ``Along``, three."""
        split = _splits(self.layout, dim)
        goals = {self.goal[m] for m in split}
        if len(goals) != 1 or goals & {dim, None}:
            return None
        by_way_of = sorted(undone - {dim, *goals, *self.layout})
        return [_Move(split, dim, by_way_of[0])] if by_way_of else None

    def _move(self, layout: Layout, dim: int, undone: Collection[int | None]) -> _Move | None:
        """The innermost mesh dims of a dim to their goal, as many at once as one collective can."""
        split = _splits(layout, dim)
        for first, mesh_dim in enumerate(split):
            into = self.goal[mesh_dim]
            together = {self.goal[m] for m in split[first:]} == {into}
            inner = into is None or all(m < mesh_dim for m in _splits(layout, into))
            if together and inner and into != dim and into not in undone:
                return _Move(split[first:], dim, into)
        return None

    def _apply(self, moves: Sequence[_Move]) -> None:
        for move in moves:
            over = self._over(move.mesh_dims)
            outer = [m for m in _splits(self.layout, move.dim) if m not in move.mesh_dims]
            size = self._over(outer).share(self.sizes[move.dim])
            into = move.into
            self.steps.append(Gather(over, move.dim, size) if into is None else Swap(over, move.dim, into, size))
            self.layout = move.moved(self.layout)

    def settle(self) -> None:
        """Bring what is left to the goal."""
        while (move := self._any_move()) is not None:
            self._apply([move])
        wrong = {m for m, (d, e) in enumerate(zip(self.layout, self.goal, strict=True)) if d != e}
        dims = {d for m in wrong for d in (self.layout[m], self.goal[m]) if d is not None}
        if not dims:
            return
        self._apply([_Move(split, d, None) for d in sorted(dims) if (split := _splits(self.layout, d))])
        self.steps.append(Place(tuple(sorted(dims))))
        self.layout = self.goal

    def _any_move(self) -> _Move | None:
        sharded = sorted({d for d in self.layout if d is not None})
        moves = (self._move(self.layout, d, ()) for d in sharded)
        return next((move for move in moves if move is not None), None)
