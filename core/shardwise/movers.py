"""Movers: one function per kind of step, which resolves it for this rank and returns the function that runs it.

The tensors here are row-major: ``redistribute`` hands over locals whose dims are in the order of the global tensor's
memory. A mover never modifies its input and its result is new memory. Pieces that differ in shape travel flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise.collectives import Group, group_of
from shardwise.layout import IDEMPOTENT_KINDS, neutral
from shardwise.placements import Placement, Shard
from shardwise.spec import TensorSpec

__all__ = ["Mover", "copied", "make_mover"]

Mover = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]
# Per tensor dim that is cut: the dim, where the part starts, how long it is.
Cuts = tuple[tuple[int, int, int], ...]


def make_mover(kind: str, src: TensorSpec, dst: TensorSpec, mesh_dims: tuple[int, ...]) -> Mover:
    """The function that runs one step (see :class:`shardwise.transition.Step`) on this rank's local tensors."""
    if kind in ("slice", "relabel"):
        return _slice(src, dst)
    if kind == "fill":
        return _fill(src, dst, mesh_dims[0])
    mesh: Any = src.mesh
    group = group_of(mesh, mesh_dims)
    if math.prod(src.shape) == 0:
        shape = dst.local_shape()
        return lambda local: local.new_empty(shape)
    return _COMMUNICATING[kind](group, src, dst)


def copied(local: Tensor) -> Tensor:
    """The tensor in row-major memory of its own."""
    return local.clone(memory_format=torch.contiguous_format)


def _row_major(local: Tensor) -> Tensor:
    """The tensor with its values in row-major memory; backends send memory, so lazy conjugation ends here."""
    return copied(local) if local.is_conj() or local.is_neg() else local.contiguous()


# -- local steps -----------------------------------------------------------------------------------------------------


def _slice(src: TensorSpec, dst: TensorSpec) -> Mover:
    cuts = _cuts(dst, src, src.coordinate())

    def run(local: Tensor) -> Tensor:
        return copied(_cut(local, cuts))

    return run


def _fill(src: TensorSpec, dst: TensorSpec, mesh_dim: int) -> Mover:
    kind = dst.pending[mesh_dim]
    where = src.coordinate()
    if isinstance(src.placements[mesh_dim], Shard):
        return _embed(src, dst, mesh_dim, kind)
    if where[mesh_dim] == 0 or kind in IDEMPOTENT_KINDS:
        return copied
    shape, value = dst.local_shape(), neutral(kind, src.dtype)
    return lambda local: local.new_full(shape, value)


def _embed(src: TensorSpec, dst: TensorSpec, mesh_dim: int, kind: str) -> Mover:
    """The shard in a tensor that is otherwise neutral. An average has no neutral value: its zeros take a factor."""
    cuts = _cuts(src, dst, src.coordinate())
    shape = dst.local_shape()
    value = 0 if kind == "avg" else neutral(kind, src.dtype)
    factor = src.mesh_shape[mesh_dim] if kind == "avg" else 1

    def run(local: Tensor) -> Tensor:
        out = local.new_full(shape, value)
        _cut(out, cuts).copy_(local if factor == 1 else local * factor)
        return out

    return run


# -- reductions ------------------------------------------------------------------------------------------------------


def _all_reduce(group: Group, src: TensorSpec, _dst: TensorSpec) -> Mover:
    kind = src.pending[group.mesh_dims[0]]
    if math.prod(src.local_shape()) == 0:
        return copied

    def run(local: Tensor) -> Tensor:
        return group.all_reduce_(local.clone(memory_format=torch.contiguous_format), kind)

    return run


def _reduce_scatter(group: Group, src: TensorSpec, dst: TensorSpec) -> Mover:
    kind = src.pending[group.mesh_dims[0]]
    dim = _shard_dim(dst, group)
    shape = dst.local_shape()
    shapes = [dst.local_shape(c) for c in _members(src, group)]
    whole = src.local_shape()
    if math.prod(whole) == 0:
        return lambda local: local.new_empty(shape)
    if len(set(shapes)) == 1:
        return _even_reduce_scatter(group, kind, dim, shape)
    lengths = [s[dim] for s in shapes]
    counts = [math.prod(s) for s in shapes]

    def run(local: Tensor) -> Tensor:
        return group.reduce_scatter_uneven(_pieces(local, dim, lengths), counts, kind).view(shape)

    return run


def _even_reduce_scatter(group: Group, kind: str, dim: int, shape: Shape) -> Mover:
    pieces = (group.size, *shape)
    if math.prod(shape[:dim]) == 1:
        return lambda local: group.reduce_scatter(_row_major(local).view(pieces), kind)
    split = (*shape[:dim], group.size, *shape[dim:])
    return lambda local: group.reduce_scatter(_row_major(local).view(split).movedim(dim, 0).contiguous(), kind)


# -- gathers ---------------------------------------------------------------------------------------------------------


def _all_gather(group: Group, src: TensorSpec, dst: TensorSpec) -> Mover:
    members = _members(src, group)
    shapes = [src.local_shape(c) for c in members]
    whole = dst.local_shape()
    if math.prod(whole) == 0:
        return lambda local: local.new_empty(whole)
    cuts = [_cuts(src, dst, c) for c in members]
    if _one_behind_the_other(shapes, cuts, whole):
        return _gather_in_place(group, shapes, whole)
    if len(set(shapes)) == 1:
        return _gather_blocks(group, src, shapes[0], whole)
    return _gather_uneven(group, shapes, cuts, whole)


def _one_behind_the_other(shapes: Sequence[Shape], cuts: Sequence[Cuts], whole: Shape) -> bool:
    """Whether pieces padded to the longest lie in a gathered buffer just as they lie in the whole's memory."""
    longest = max(map(math.prod, shapes))
    for position, (shape, cut) in enumerate(zip(shapes, cuts, strict=True)):
        if math.prod(shape) == 0:
            continue
        if len(cut) > 1 or (cut and math.prod(whole[: cut[0][0]]) != 1):
            return False
        start = cut[0][1] * math.prod(whole[cut[0][0] + 1 :]) if cut else 0
        if start != position * longest:
            return False
    return True


def _gather_in_place(group: Group, shapes: Sequence[Shape], whole: Shape) -> Mover:
    longest = max(map(math.prod, shapes))
    total = math.prod(whole)
    if longest * group.size == total:
        return lambda local: group.all_gather_into(local.new_empty(whole), _row_major(local))
    padded_size = longest * group.size

    def run(local: Tensor) -> Tensor:
        out = local.new_empty(padded_size)
        return group.all_gather_into(out, _padded(local, longest))[:total].view(whole)

    return run


def _gather_blocks(group: Group, src: TensorSpec, shape: Shape, whole: Shape) -> Mover:
    """Pieces of one shape: stack them, then move each mesh dim's axis in front of the tensor dim that it shards."""
    grid = [src.mesh_shape[m] for m in group.mesh_dims]
    stacked = (*grid, *shape)
    sharded = [_dim(src.placements[m]) for m in group.mesh_dims]
    axes: list[int] = []
    for d in range(len(shape)):
        axes += [axis for axis, dim in enumerate(sharded) if dim == d]
        axes.append(len(grid) + d)
    # Not reshape: where a piece has one element along a dim it would return a view with other strides.
    return lambda local: group.all_gather(_row_major(local)).view(stacked).permute(axes).contiguous().view(whole)


def _gather_uneven(group: Group, shapes: Sequence[Shape], cuts: Sequence[Cuts], whole: Shape) -> Mover:
    longest = max(map(math.prod, shapes))
    places = [(i, shape, math.prod(shape), cut) for i, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))]
    filled = [place for place in places if place[2]]

    def run(local: Tensor) -> Tensor:
        gathered = group.all_gather(_padded(local, longest))
        out = local.new_empty(whole)
        for i, shape, count, cut in filled:
            _cut(out, cut).copy_(gathered[i, :count].view(shape))
        return out

    return run


def _padded(local: Tensor, length: int) -> Tensor:
    """The elements as a flat tensor of ``length``; what lies beyond them is left as it is."""
    flat = _row_major(local).view(-1)
    if flat.numel() == length:
        return flat
    padded = local.new_empty(length)
    padded[: flat.numel()] = flat
    return padded


# -- exchanges -------------------------------------------------------------------------------------------------------


def _all_to_all(group: Group, src: TensorSpec, dst: TensorSpec) -> Mover:
    members = _members(src, group)
    before, after = [src.local_shape(c) for c in members], [dst.local_shape(c) for c in members]
    old, new = _shard_dim(src, group), _shard_dim(dst, group)
    if len(set(before)) == 1 and len(set(after)) == 1:
        return _even_all_to_all(group, old, new, before[0], after[0])
    here = dst.local_shape()
    if sum(map(math.prod, before)) == 0:
        return lambda local: local.new_empty(here)
    lengths = [shape[new] for shape in after]
    mine = before[group.position]
    sent = [_replaced(mine, new, length) for length in lengths]
    received = [_replaced(shape, new, here[new]) for shape in before]
    send_counts, receive_counts = list(map(math.prod, sent)), list(map(math.prod, received))
    old_lengths = [shape[old] for shape in before]

    def run(local: Tensor) -> Tensor:
        flat = group.exchange(_pieces(local, new, lengths), send_counts, receive_counts)
        out = local.new_empty(here)
        places, parts = out.split_with_sizes(old_lengths, old), flat.split_with_sizes(receive_counts)
        for place, part, shape in zip(places, parts, received, strict=True):
            place.copy_(part.view(shape))
        return out

    return run


def _even_all_to_all(group: Group, old: int, new: int, before: Shape, shape: Shape) -> Mover:
    split = (*before[:new], group.size, shape[new], *before[new + 1 :])

    def run(local: Tensor) -> Tensor:
        pieces = _row_major(local).view(split).movedim(new, 0).contiguous()
        return group.all_to_all(pieces).movedim(0, old).contiguous().view(shape)

    return run


# -- places ----------------------------------------------------------------------------------------------------------


def _members(spec: TensorSpec, group: Group) -> list[tuple[int, ...]]:
    """The coordinates of the group's ranks, in its order."""
    here = spec.coordinate()
    found = []
    for along in product(*(range(spec.mesh_shape[m]) for m in group.mesh_dims)):
        coordinate = list(here)
        for m, i in zip(group.mesh_dims, along, strict=True):
            coordinate[m] = i
        found.append(tuple(coordinate))
    return found


def _cuts(part: TensorSpec, whole: TensorSpec, coordinate: Sequence[int]) -> Cuts:
    """Where one rank's local tensor under ``part`` lies in its local tensor under ``whole``."""
    small, inner = part.local_shape_and_offset(coordinate)
    large, outer = whole.local_shape_and_offset(coordinate)
    places = enumerate(zip(small, inner, large, outer, strict=True))
    return tuple((d, start - base, size) for d, (size, start, full, base) in places if size != full)


def _cut(tensor: Tensor, cuts: Cuts) -> Tensor:
    for dim, start, size in cuts:
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _pieces(local: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
    """All elements, flat, piece by piece of a split along ``dim``."""
    if math.prod(local.shape[:dim]) == 1:
        return _row_major(local).view(-1)
    return torch.cat([piece.reshape(-1) for piece in local.split_with_sizes(list(lengths), dim)])


def _replaced(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _dim(placement: Placement) -> int:
    if not isinstance(placement, Shard):
        raise TypeError(f"{placement} shards no dim")
    return placement.dim


def _shard_dim(spec: TensorSpec, group: Group) -> int:
    return _dim(spec.placements[group.mesh_dims[0]])


_COMMUNICATING: dict[str, Callable[[Group, TensorSpec, TensorSpec], Mover]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}
