"""Packing: the pieces of a tensor in flat memory, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor

from shardwise.private_torch.ops import define_op
from shardwise.private_torch.tracing import is_recorded

__all__ = [
    "Piece",
    "Run",
    "Shape",
    "all_equal",
    "copied",
    "copies_of",
    "is_one_run",
    "packer",
    "row_major",
    "unpack",
    "unpacker",
]

Run = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


def copied(local: Tensor) -> Tensor:
    """A row-major copy."""
    return local.clone(memory_format=torch.contiguous_format)


def row_major(local: Tensor) -> Tensor:
    """The tensor in row-major memory. Lazy conjugation and negation are carried out, because backends send memory."""
    return copied(local) if local.is_conj() or local.is_neg() else local.contiguous()


@frozen
class Piece:
    """A box of a tensor. The offsets of its first element are in elements, in the tensor's memory and when packed."""

    shape: Shape
    whole_offset: int
    packed_offset: int


# One copy: its size, strides and offset in the memory of the whole, strides and offset in the packed memory.
Block = tuple[Shape, Shape, int, Shape, int]


def copies_of(pieces: Sequence[Piece], whole: Shape) -> list[Block]:
    """The copies between a row-major tensor and its packed pieces. Pieces of one shape at even distances are one copy.

    The rows of a (4, 6) tensor that is split in two along dim 1 are pieces of shape (4, 3), one from element 0 and one
    from element 3 on: one copy of shape (2, 4, 3).
    """
    strides = _strides(whole)
    blocks: list[Block] = []
    runs: list[list[Piece]] = []
    for piece in pieces:
        run = [*runs[-1], piece] if runs else []
        steps = [(b.whole_offset - a.whole_offset, b.packed_offset - a.packed_offset) for a, b in pairwise(run)]
        # A step must lead forward: a tensor has no negative strides.
        if steps and piece.shape == run[0].shape and all_equal(steps) and min(steps[0]) > 0:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    for run in runs:
        shape, at, to = run[0].shape, run[0].whole_offset, run[0].packed_offset
        if len(run) == 1:
            blocks.append((shape, strides, at, _strides(shape), to))
        else:
            step, packed_step = run[1].whole_offset - at, run[1].packed_offset - to
            blocks.append(((len(run), *shape), (step, *strides), at, (packed_step, *_strides(shape)), to))
    return blocks


def _split(whole: Shape, dim: int, shapes: Sequence[Shape]) -> list[Piece]:
    """The pieces of a split along ``dim`` that are not empty, packed one after the other."""
    pieces, start, packed = [], 0, 0
    for shape in shapes:
        if math.prod(shape):
            pieces.append(Piece(shape, start * math.prod(whole[dim + 1 :]), packed))
        start += shape[dim]
        packed += math.prod(shape)
    return pieces


def packer(whole: Shape, dim: int, shapes: Sequence[Shape]) -> Run:
    """A function that packs a tensor flat, piece by piece of a split along ``dim``.

    A tensor without elements is seen as flat, like the result of :func:`unpacker`: in a graph memory that nobody writes
    would be no result of the tensor, and a compiler drops what is sent of it, or sends it somewhere else.
    """
    if math.prod(whole[:dim]) == 1 or not math.prod(whole):
        return lambda local: row_major(local).view(-1)
    blocks = copies_of(_split(whole, dim, shapes), whole)
    count = math.prod(whole)
    sizes = [shape[dim] for shape in shapes]

    def pack(local: Tensor) -> Tensor:
        if is_recorded(local):
            packed: Tensor = _packed(local, dim, sizes)
            return packed
        source, flat = row_major(local), local.new_empty(count)
        base = source.storage_offset()
        for size, there, at, here, to in blocks:
            flat.as_strided(size, here, to).copy_(source.as_strided(size, there, base + at))
        return flat

    return pack


def _pack_in_graph(whole: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    shape = tuple(whole.shape)
    packed = packer(shape, dim, [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes])(whole)
    # The result of an op is no view of what it was given.
    return packed.clone() if packed.data_ptr() == whole.data_ptr() else packed


def _pack_without_data(whole: Tensor, _dim: int, _sizes: Sequence[int]) -> Tensor:
    return whole.new_empty(whole.numel())


# Packing in a graph is one call: compilers leave out copies, and with them the storage offset that a graph had asked
# for, while slices would add guards on sizes, so that each size were compiled anew.
_packed = define_op(
    "shardwise::pack(Tensor whole, int dim, SymInt[] sizes) -> Tensor", _pack_in_graph, _pack_without_data
)


def unpacker(whole: Shape, dim: int, shapes: Sequence[Shape]) -> Run:
    """A function that undoes :func:`packer`."""
    if math.prod(whole[:dim]) == 1 or not math.prod(whole):
        return lambda flat: flat.view(whole)
    blocks = copies_of(_split(whole, dim, shapes), whole)
    return lambda flat: unpack(flat, flat.new_empty(whole), blocks)


def unpack(packed: Tensor, out: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Copy packed pieces into ``out``."""
    for size, there, at, here, to in blocks:
        out.as_strided(size, there, at).copy_(packed.as_strided(size, here, to))
    return out


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def all_equal(values: Sequence[Shape]) -> bool:
    """Whether all values are the same. Not by a set: sizes may be symbols."""
    return all(value == values[0] for value in values)


def is_one_run(shape: Shape, whole: Shape) -> bool:
    """Whether a box of ``shape`` in a row-major tensor of shape ``whole`` is one run of its memory."""
    cut = [d for d, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
    return not cut or math.prod(shape[: cut[-1]]) == 1
