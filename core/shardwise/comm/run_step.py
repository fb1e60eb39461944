"""The steps of a redistribution: one function per kind of step prepares it for this rank.

The tensors here are row-major: ``redistribute`` passes local tensors with their dims in the order of the global
tensor's memory. A step never modifies its input, and its result is new memory. Pieces of different shapes are sent
flat.
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
from shardwise.comm.collectives import Collectives
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
from shardwise.private_torch.tracing import is_recorded
from shardwise.rule.counted import tensor_if, tied_to

__all__ = ["Start", "StepRunner"]

Start = Callable[[Tensor], AsyncResult]
# Per tensor dim that is cut: the dim, where the part starts, how long it is.
Cuts = tuple[tuple[int, int, int], ...]


@frozen
class StepRunner:
    """One step, ready to run on this rank: ``run`` returns the local tensor after it.

    ``start`` issues the step's collective and returns an :class:`AsyncResult`; None for a step without a collective.
    ``groups`` are those of the collectives.
    """

    run: Run
    start: Start | None = None
    groups: tuple[Group, ...] = ()

    def tell_subject(self, subject: int) -> None:
        """What runs next is for the tensor that a number stands for: see :func:`subject_code`."""
        for group in self.groups:
            group.log.tell_subject(subject)

    @classmethod
    def of(cls, kind: str, src: TensorSpec, dst: TensorSpec, mesh_dims: tuple[int, ...]) -> StepRunner:
        """Prepare one step (see :class:`shardwise.planning.path.Step`) for this rank's local tensors."""
        if kind in ("slice", "relabel"):
            cuts = _cuts(dst, src, src.coordinate())
            return cls(lambda local: _cut(local, cuts).clone(memory_format=torch.contiguous_format))
        if kind == "fill":
            return cls(_fill(src, dst, mesh_dims[0]))
        mesh: Any = src.mesh
        group = group_of(mesh, mesh_dims)
        # A rank with an empty part still takes part if another rank of the group has a part that is not empty.
        if math.prod(src.shape) == 0:
            is_empty = True
        elif kind == "all_to_all":
            is_empty = all(math.prod(src.local_shape(c)) == 0 for c in _members(src, group))
        else:
            is_empty = math.prod((dst if kind == "all_gather" else src).local_shape()) == 0
        if is_empty:
            shape = dst.local_shape()
            return cls(lambda local: local.new_empty(shape))
        prepare = _COLLECTIVES[kind]
        start_now = prepare(group, src, dst)

        def run(local: Tensor) -> Tensor:  # not by `start`: a call less
            return (prepare(group.in_graph, src, dst) if is_recorded(local) else start_now)(local).wait()

        def start(local: Tensor) -> AsyncResult:
            return (prepare(group.in_graph, src, dst) if is_recorded(local) else start_now)(local)

        return cls(run, start, (group,))


def _fill(src: TensorSpec, dst: TensorSpec, mesh_dim: int) -> Run:
    """Make a mesh dim partial. The first rank keeps a whole tensor, or each rank its shard; the rest is neutral."""
    kind = dst.reductions[mesh_dim]
    shape = dst.local_shape()
    if not isinstance(src.placements[mesh_dim], Shard):
        if kind in IDEMPOTENT_KINDS:
            return copied
        counts, value = src.coordinate()[mesh_dim] == 0, neutral(kind, src.dtype)

        def keep(local: Tensor) -> Tensor:
            kept = tensor_if(counts, local, value)
            return copied(local) if kept is local else kept

        return keep
    cuts = _cuts(src, dst, src.coordinate())
    # An average has no neutral value: with zeros around it, the shard must be multiplied by the number of ranks.
    value = neutral("sum" if kind == "avg" else kind, src.dtype)
    factor = src.mesh_shape[mesh_dim] if kind == "avg" else 1

    def run(local: Tensor) -> Tensor:
        out = local.new_full(shape, value)
        part = _cut(out, cuts).copy_(local)
        if factor != 1:
            (torch.view_as_real(part) if part.is_complex() else part).mul_(factor)
        return out

    return run


# -- reductions ------------------------------------------------------------------------------------------------------


def _all_reduce(group: Collectives, src: TensorSpec, _dst: TensorSpec) -> Start:
    kind = src.reductions[group.mesh_dims[0]]
    return lambda local: group.start_all_reduce(local.clone(memory_format=torch.contiguous_format), kind)


def _reduce_scatter(group: Collectives, src: TensorSpec, dst: TensorSpec) -> Start:
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
    """Stack the pieces of an even split along ``dim``; a view if they follow each other in memory."""
    stacked = (parts, *shape)
    if math.prod(shape[:dim]) == 1:
        return lambda local: row_major(local).view(stacked)
    split = (*shape[:dim], parts, *shape[dim:])
    axes = (dim, *range(dim), *range(dim + 1, len(split)))
    return lambda local: row_major(local).view(split).permute(axes).contiguous()


# -- gathers ---------------------------------------------------------------------------------------------------------


def _all_gather(group: Collectives, src: TensorSpec, dst: TensorSpec) -> Start:
    """Gather pieces that are padded to the longest one.

    Where every padded piece follows the one before it in the memory of the whole, nothing is copied afterwards.
    """
    members = _members(src, group)
    shapes = [src.local_shape(c) for c in members]
    whole = dst.local_shape()
    total, longest = math.prod(whole), max(map(math.prod, shapes))
    padded_size = longest * group.size
    pieces = []
    for i, (shape, coordinate) in enumerate(zip(shapes, members, strict=True)):
        offset = sum(start * math.prod(whole[dim + 1 :]) for dim, start, _ in _cuts(src, dst, coordinate))
        if math.prod(shape):
            pieces.append(Piece(shape, offset, i * longest))
    in_place = all(p.whole_offset == p.packed_offset and is_one_run(p.shape, whole) for p in pieces)
    if in_place and padded_size == total:
        return lambda local: group.start_all_gather(local.new_empty(whole), row_major(local))
    if not in_place and all_equal(shapes):
        return _gather_blocks(group, src, shapes[0], whole)
    blocks = [] if in_place else copies_of(pieces, whole)

    def put(gathered: Tensor) -> Tensor:
        if in_place:
            return gathered[:total].view(whole)
        return unpack(gathered, gathered.new_empty(whole), blocks)

    return lambda local: group.start_all_gather(local.new_empty(padded_size), _padded(local, longest)).then(put)


def _gather_blocks(group: Collectives, src: TensorSpec, shape: Shape, whole: Shape) -> Start:
    """Gather pieces of one shape: stack them, then move the axis of each mesh dim to the tensor dim that it shards."""
    grid = [src.mesh_shape[m] for m in group.mesh_dims]
    stacked = (*grid, *shape)
    sharded = [_dim(src.placements[m]) for m in group.mesh_dims]
    axes: list[int] = []
    for d in range(len(shape)):
        axes += [axis for axis, dim in enumerate(sharded) if dim == d]
        axes.append(len(grid) + d)

    # Not reshape: for a piece with one element along a dim it would return a view with other strides.
    def put(gathered: Tensor) -> Tensor:
        return gathered.permute(axes).contiguous().view(whole)

    return lambda local: group.start_all_gather(local.new_empty(stacked), row_major(local)).then(put)


def _padded(local: Tensor, length: int) -> Tensor:
    """A flat tensor of ``length`` that starts with the elements; the rest of it has any values."""
    flat = row_major(local).view(-1)
    if flat.numel() == length:
        return flat
    if is_recorded(local):
        # Compilers merge equal calls, but not calls on memory that is not written yet. So a rank whose piece needs no
        # padding would merge two gathers that other ranks do not merge.
        filling = flat.new_zeros(length - flat.numel())
        if flat.numel():
            return torch.cat([flat, filling])
        # A join with nothing is a constant for a compiler.
        return tied_to(filling, flat)
    padded = local.new_empty(length)
    padded[: flat.numel()] = flat
    return padded


# -- exchanges -------------------------------------------------------------------------------------------------------


def _all_to_all(group: Collectives, src: TensorSpec, dst: TensorSpec) -> Start:
    members = _members(src, group)
    before, after = [src.local_shape(c) for c in members], [dst.local_shape(c) for c in members]
    old, new = _shard_dim(src, group), _shard_dim(dst, group)
    if not (all_equal(before) and all_equal(after)):
        held, shape = before[group.position], dst.local_shape()
        sent = [_replaced(held, new, other[new]) for other in after]
        received = [_replaced(other, new, shape[new]) for other in before]
        counts = list(map(math.prod, sent)), list(map(math.prod, received))
        pack, unpack = packer(held, new, sent), unpacker(shape, old, received)
        return lambda local: group.start_exchange(pack(local), *counts).then(unpack)
    shape = after[0]
    pieces = _even_pieces(group.size, new, _replaced(before[0], new, shape[new]))
    if math.prod(shape[:old]) == 1:
        return lambda local: group.start_all_to_all(pieces(local)).then(lambda stacked: stacked.view(shape))
    axes = (*range(1, old + 1), 0, *range(old + 1, len(shape) + 1))

    def put(stacked: Tensor) -> Tensor:
        return stacked.permute(axes).contiguous().view(shape)

    return lambda local: group.start_all_to_all(pieces(local)).then(put)


# -- places ----------------------------------------------------------------------------------------------------------


def _members(spec: TensorSpec, group: Collectives) -> list[tuple[int, ...]]:
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
    """The cuts that leave one rank's local tensor under ``part`` of its local tensor under ``whole``."""
    small, inner = part.local_shape_and_offset(coordinate)
    large, outer = whole.local_shape_and_offset(coordinate)
    extents = enumerate(zip(small, inner, large, outer, strict=True))
    return tuple((d, start - base, size) for d, (size, start, full, base) in extents if size != full)


def _cut(tensor: Tensor, cuts: Cuts) -> Tensor:
    for dim, start, size in cuts:
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _replaced(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _dim(placement: Placement) -> int:
    if not isinstance(placement, Shard):
        raise TypeError(f"{placement} shards no dim")
    return placement.dim


def _shard_dim(spec: TensorSpec, group: Collectives) -> int:
    return _dim(spec.placements[group.mesh_dims[0]])


_COLLECTIVES: dict[str, Callable[[Collectives, TensorSpec, TensorSpec], Start]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}
