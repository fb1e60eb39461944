"""Pieces of a tensor, packed into flat memory and unpacked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor

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
    """The tensor in row-major memory of its own."""
    return local.clone(memory_format=torch.contiguous_format)


def row_major(local: Tensor) -> Tensor:
    """The tensor with its values in row-major memory; backends send memory, so lazy conjugation ends here."""
    return copied(local) if local.is_conj() or local.is_neg() else local.contiguous()


@frozen
class Piece:
    """A box of a tensor; the offsets count elements, in the tensor's memory and in the packed one."""

    shape: Shape
    whole_offset: int
    packed_offset: int


# Size, strides and offset in the whole's memory, strides and offset in the packed memory: one copy.
Block = tuple[Shape, Shape, int, Shape, int]


def copies_of(pieces: Sequence[Piece], whole: Shape) -> list[Block]:
    """The copies between a row-major tensor and its packed pieces; pieces of one shape at even distances are one copy.

    The rows of a (4, 6) tensor that is split in two along dim 1 are pieces of shape (4, 3), one from element 0 and one
    from element 3 on: one copy of shape (2, 4, 3).
    """
    strides = _strides(whole)
    blocks: list[Block] = []
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and piece.shape == runs[-1][0].shape and _evenly([*runs[-1], piece]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    for run in runs:
        shape, at, to = run[0].shape, run[0].whole_offset, run[0].packed_offset
        if len(run) == 1:
            blocks.append((shape, strides, at, _strides(shape), to))
        else:
            steps = run[1].whole_offset - at, run[1].packed_offset - to
            blocks.append(((len(run), *shape), (steps[0], *strides), at, (steps[1], *_strides(shape)), to))
    return blocks


def _evenly(pieces: Sequence[Piece]) -> bool:
    """Whether the distances between the pieces are the same, and lead forward."""
    steps = [(b.whole_offset - a.whole_offset, b.packed_offset - a.packed_offset) for a, b in pairwise(pieces)]
    return all_equal(steps) and min(steps[0]) > 0  # a tensor has no negative strides


def _split(whole: Shape, dim: int, shapes: Sequence[Shape]) -> list[Piece]:
    """The filled pieces of a split along ``dim``, packed one behind the other."""
    pieces, start, packed = [], 0, 0
    for shape in shapes:
        if math.prod(shape):
            pieces.append(Piece(shape, start * math.prod(whole[dim + 1 :]), packed))
        start += shape[dim]
        packed += math.prod(shape)
    return pieces


def packer(whole: Shape, dim: int, shapes: Sequence[Shape]) -> Run:
    """A function that gives all elements, flat, piece by piece of a split along ``dim``."""
    if math.prod(whole[:dim]) == 1:
        return lambda local: row_major(local).view(-1)
    blocks = copies_of(_split(whole, dim, shapes), whole)
    count = math.prod(whole)

    def pack(local: Tensor) -> Tensor:
        source, flat = row_major(local), local.new_empty(count)
        base = source.storage_offset()
        for size, there, at, here, to in blocks:
            flat.as_strided(size, here, to).copy_(source.as_strided(size, there, base + at))
        return flat

    return pack


def unpacker(whole: Shape, dim: int, shapes: Sequence[Shape]) -> Run:
    """The inverse of :func:`packing`."""
    if math.prod(whole[:dim]) == 1:
        return lambda flat: flat.view(whole)
    blocks = copies_of(_split(whole, dim, shapes), whole)
    return lambda flat: unpack(flat, flat.new_empty(whole), blocks)


def unpack(packed: Tensor, out: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Fill ``out`` by copies from packed memory."""
    for size, there, at, here, to in blocks:
        out.as_strided(size, there, at).copy_(packed.as_strided(size, here, to))
    return out


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def all_equal(values: Sequence[Shape]) -> bool:
    """Whether all values are the same. Not by a set: sizes may be symbols."""
    return all(value == values[0] for value in values)


def is_one_run(shape: Shape, whole: Shape) -> bool:
    """Whether a box of that shape is one run of a row-major tensor's memory."""
    cut = [d for d, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
    return not cut or math.prod(shape[: cut[-1]]) == 1
