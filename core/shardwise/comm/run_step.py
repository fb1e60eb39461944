"""The steps of a redistribution, carried out: one function per kind of step prepares it for this rank.

The tensors here are row-major: ``redistribute`` passes local tensors whose dims are in the order of the global tensor's
memory. A step never modifies its input, and its result is new memory. Pieces that differ in shape are sent flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.group import Group
from shardwise.comm.groups import group_of
from shardwise.comm.packing import (
    Piece,
    Run,
    Shape,
    all_equal,
    copied,
    copies_of,
    is_one_run,
    packer,
    row_major,
    unpack,
    unpacker,
)
from shardwise.kernel.placements import Placement, Shard
from shardwise.kernel.reductions import IDEMPOTENT_KINDS, neutral
from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.tracing import is_traced

__all__ = ["StepRunner"]

Start = Callable[[Tensor], AsyncResult]
# Per tensor dim that is cut: the dim, where the part starts, how long it is.
Cuts = tuple[tuple[int, int, int], ...]


@frozen
class StepRunner:
    """One step, ready to run on this rank: ``run`` gives the local tensor after it.

    ``start`` issues what the step communicates and gives an :class:`AsyncResult`; None where nothing is communicated.
    """

    run: Run
    start: Start | None = None

    @classmethod
    def of(cls, kind: str, src: TensorSpec, dst: TensorSpec, mesh_dims: tuple[int, ...]) -> StepRunner:
        """Prepare one step (see :class:`shardwise.planning.path.Step`) for this rank's local tensors."""
        if kind in ("slice", "relabel"):
            return cls(_slice(src, dst))
        if kind == "fill":
            return cls(_fill(src, dst, mesh_dims[0]))
        mesh: Any = src.mesh
        group = group_of(mesh, mesh_dims)
        # A rank whose part is empty still takes part where another's is not.
        if math.prod(src.shape) == 0 or _nothing_moves(kind, src, dst, group):
            shape = dst.local_shape()
            return cls(lambda local: local.new_empty(shape))
        start = _COLLECTIVES[kind](group, src, dst)
        return cls(lambda local: start(local).wait(), start)


def _nothing_moves(kind: str, src: TensorSpec, dst: TensorSpec, group: Group) -> bool:
    """Whether what this group's ranks hold together is empty, though the global tensor is not."""
    if kind == "all_gather":
        return math.prod(dst.local_shape()) == 0
    if kind == "all_to_all":
        return all(math.prod(src.local_shape(c)) == 0 for c in _members(src, group))
    return math.prod(src.local_shape()) == 0


# -- local steps -----------------------------------------------------------------------------------------------------


def _slice(src: TensorSpec, dst: TensorSpec) -> Run:
    cuts = _cuts(dst, src, src.coordinate())
    return lambda local: _cut(local, cuts).clone(memory_format=torch.contiguous_format)


def _fill(src: TensorSpec, dst: TensorSpec, mesh_dim: int) -> Run:
    kind = dst.reductions[mesh_dim]
    where = src.coordinate()
    if isinstance(src.placements[mesh_dim], Shard):
        return _embed(src, dst, mesh_dim, kind)
    if where[mesh_dim] == 0 or kind in IDEMPOTENT_KINDS:
        return copied
    shape, value = dst.local_shape(), neutral(kind, src.dtype)
    return lambda local: local.new_full(shape, value)


def _embed(src: TensorSpec, dst: TensorSpec, mesh_dim: int, kind: str) -> Run:
    """Put the shard into a tensor of neutral values. An average has none: its zeros need the shard times a factor."""
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


def _all_reduce(group: Group, src: TensorSpec, _dst: TensorSpec) -> Start:
    kind = src.reductions[group.mesh_dims[0]]
    return lambda local: group.start_all_reduce(local.clone(memory_format=torch.contiguous_format), kind)


def _reduce_scatter(group: Group, src: TensorSpec, dst: TensorSpec) -> Start:
    kind = src.reductions[group.mesh_dims[0]]
    dim = _shard_dim(dst, group)
    shape = dst.local_shape()
    shapes = [dst.local_shape(c) for c in _members(src, group)]
    if all_equal(shapes):
        pieces = _even_pieces(group.size, dim, shape)
        return lambda local: group.start_reduce_scatter(pieces(local), kind)
    counts = list(map(math.prod, shapes))
    pack = packer(src.local_shape(), dim, shapes)
    return lambda local: group.start_reduce_scatter_uneven(pack(local), counts, kind).then(
        lambda flat: flat.view(shape)
    )


def _even_pieces(parts: int, dim: int, shape: Shape) -> Run:
    """Stack the pieces of an even split along ``dim``; a view where they lie one behind the other."""
    stacked = (parts, *shape)
    if math.prod(shape[:dim]) == 1:
        return lambda local: row_major(local).view(stacked)
    split = (*shape[:dim], parts, *shape[dim:])
    axes = (dim, *range(dim), *range(dim + 1, len(split)))
    return lambda local: row_major(local).view(split).permute(axes).contiguous()


# -- gathers ---------------------------------------------------------------------------------------------------------


def _all_gather(group: Group, src: TensorSpec, dst: TensorSpec) -> Start:
    members = _members(src, group)
    shapes = [src.local_shape(c) for c in members]
    whole = dst.local_shape()
    longest = max(map(math.prod, shapes))
    at = [_offset(_cuts(src, dst, c), whole) for c in members]
    pieces = [Piece(s, o, i * longest) for i, (s, o) in enumerate(zip(shapes, at, strict=True)) if math.prod(s)]
    if all(p.whole_offset == p.packed_offset and is_one_run(p.shape, whole) for p in pieces):
        return _gather_in_place(group, longest, whole)
    if all_equal(shapes):
        return _gather_blocks(group, src, shapes[0], whole)
    return _gather_uneven(group, longest, pieces, whole)


def _gather_in_place(group: Group, longest: int, whole: Shape) -> Start:
    """Padded to the longest, the pieces lie in the gathered memory as they lie in the whole: nothing is copied."""
    total = math.prod(whole)
    if longest * group.size == total:
        return lambda local: group.start_all_gather(local.new_empty(whole), row_major(local))
    padded_size = longest * group.size

    def start(local: Tensor) -> AsyncResult:
        result = group.start_all_gather(local.new_empty(padded_size), _padded(local, longest))
        return result.then(lambda padded: padded[:total].view(whole))

    return start


def _gather_blocks(group: Group, src: TensorSpec, shape: Shape, whole: Shape) -> Start:
    """Pieces of one shape: stack them, then move each mesh dim's axis in front of the tensor dim that it shards."""
    grid = [src.mesh_shape[m] for m in group.mesh_dims]
    stacked = (*grid, *shape)
    sharded = [_dim(src.placements[m]) for m in group.mesh_dims]
    axes: list[int] = []
    for d in range(len(shape)):
        axes += [axis for axis, dim in enumerate(sharded) if dim == d]
        axes.append(len(grid) + d)

    # Not reshape: where a piece has one element along a dim it would return a view with other strides.
    def put(gathered: Tensor) -> Tensor:
        return gathered.permute(axes).contiguous().view(whole)

    return lambda local: group.start_all_gather(local.new_empty(stacked), row_major(local)).then(put)


def _gather_uneven(group: Group, longest: int, pieces: Sequence[Piece], whole: Shape) -> Start:
    blocks = copies_of(pieces, whole)
    padded_size = longest * group.size

    def put(gathered: Tensor) -> Tensor:
        return unpack(gathered, gathered.new_empty(whole), blocks)

    return lambda local: group.start_all_gather(local.new_empty(padded_size), _padded(local, longest)).then(put)


def _padded(local: Tensor, length: int) -> Tensor:
    """The elements at the front of a flat tensor of ``length``; the rest of it has any values."""
    flat = row_major(local).view(-1)
    if flat.numel() == length:
        return flat
    if is_traced(local):
        # Compilers merge equal calls, but never calls on memory that is not written yet. So ranks whose parts need no
        # padding would send less often than the others.
        return torch.cat([flat, flat.new_zeros(length - flat.numel())])
    padded = local.new_empty(length)
    padded[: flat.numel()] = flat
    return padded


# -- exchanges -------------------------------------------------------------------------------------------------------


def _all_to_all(group: Group, src: TensorSpec, dst: TensorSpec) -> Start:
    members = _members(src, group)
    before, after = [src.local_shape(c) for c in members], [dst.local_shape(c) for c in members]
    old, new = _shard_dim(src, group), _shard_dim(dst, group)
    if all_equal(before) and all_equal(after):
        return _even_all_to_all(group, old, new, before[0], after[0])
    here = dst.local_shape()
    mine = before[group.position]
    sent = [_replaced(mine, new, shape[new]) for shape in after]
    received = [_replaced(shape, new, here[new]) for shape in before]
    counts = list(map(math.prod, sent)), list(map(math.prod, received))
    pack, unpack = packer(mine, new, sent), unpacker(here, old, received)
    return lambda local: group.start_exchange(pack(local), *counts).then(unpack)


def _even_all_to_all(group: Group, old: int, new: int, before: Shape, shape: Shape) -> Start:
    pieces = _even_pieces(group.size, new, _replaced(before, new, shape[new]))
    if math.prod(shape[:old]) == 1:
        return lambda local: group.start_all_to_all(pieces(local)).then(lambda stacked: stacked.view(shape))
    axes = (*range(1, old + 1), 0, *range(old + 1, len(shape) + 1))

    def put(stacked: Tensor) -> Tensor:
        return stacked.permute(axes).contiguous().view(shape)

    return lambda local: group.start_all_to_all(pieces(local)).then(put)


# -- places ----------------------------------------------------------------------------------------------------------


def _members(spec: TensorSpec, group: Group) -> list[tuple[int, ...]]:
    """The coordinates of the group's ranks, in its order."""
    here = spec.coordinate()
    members = []
    for along in product(*(range(spec.mesh_shape[m]) for m in group.mesh_dims)):
        coordinate = list(here)
        for m, i in zip(group.mesh_dims, along, strict=True):
            coordinate[m] = i
        members.append(tuple(coordinate))
    return members


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


def _offset(cuts: Cuts, whole: Shape) -> int:
    """Where a part starts in the memory of the row-major whole, in elements."""
    return sum(start * math.prod(whole[dim + 1 :]) for dim, start, _ in cuts)


def _replaced(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _dim(placement: Placement) -> int:
    if not isinstance(placement, Shard):
        raise TypeError(f"{placement} shards no dim")
    return placement.dim


def _shard_dim(spec: TensorSpec, group: Group) -> int:
    return _dim(spec.placements[group.mesh_dims[0]])


_COLLECTIVES: dict[str, Callable[[Group, TensorSpec, TensorSpec], Start]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}
