"""Pieces of a tensor, packed into flat memory and unpacked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["Run", "copied"]

Run = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


def copied(local: Tensor) -> Tensor:
    """The tensor in row-major memory of its own."""
    return local.clone(memory_format=torch.contiguous_format)


def _row_major(local: Tensor) -> Tensor:
    """The tensor with its values in row-major memory; backends send memory, so lazy conjugation ends here."""
    return copied(local) if local.is_conj() or local.is_neg() else local.contiguous()


# -- pieces of a tensor, packed one behind the other -------------------------------------------------------------------


@frozen
class Piece:
    """A box of a tensor; the offsets count elements, in the tensor's memory and in the packed one."""

    shape: Shape
    whole_offset: int
    packed_offset: int


# Size, strides and offset in the whole's memory, strides and offset in the packed memory: one copy.
Block = tuple[Shape, Shape, int, Shape, int]


def _blocks(pieces: Sequence[Piece], whole: Shape) -> list[Block]:
    """The copies between a row-major tensor and its packed pieces; pieces at even distances go in one."""
    strides = _strides(whole)
    blocks: list[Block] = []
    for run in _runs(pieces):
        shape, at, to = run[0].shape, run[0].whole_offset, run[0].packed_offset
        if len(run) == 1:
            blocks.append((shape, strides, at, _strides(shape), to))
        else:
            steps = run[1].whole_offset - at, run[1].packed_offset - to
            blocks.append(((len(run), *shape), (steps[0], *strides), at, (steps[1], *_strides(shape)), to))
    return blocks


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces in runs of one shape and one distance forward."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and piece.shape == runs[-1][0].shape and _evenly([*runs[-1], piece]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _evenly(pieces: Sequence[Piece]) -> bool:
    steps = [(b.whole_offset - a.whole_offset, b.packed_offset - a.packed_offset) for a, b in pairwise(pieces)]
    return _alike(steps) and min(steps[0]) > 0  # a tensor has no negative strides


def _split(whole: Shape, dim: int, shapes: Sequence[Shape]) -> list[Piece]:
    """The filled pieces of a split along ``dim``, packed one behind the other."""
    pieces, start, packed = [], 0, 0
    for shape in shapes:
        if math.prod(shape):
            pieces.append(Piece(shape, start * math.prod(whole[dim + 1 :]), packed))
        start += shape[dim]
        packed += math.prod(shape)
    return pieces


def _packing(whole: Shape, dim: int, shapes: Sequence[Shape]) -> Run:
    """All elements, flat, piece by piece of a split along ``dim``."""
    if math.prod(whole[:dim]) == 1:
        return lambda local: _row_major(local).view(-1)
    blocks = _blocks(_split(whole, dim, shapes), whole)
    count = math.prod(whole)

    def pack(local: Tensor) -> Tensor:
        source, flat = _row_major(local), local.new_empty(count)
        base = source.storage_offset()
        for size, there, at, here, to in blocks:
            flat.as_strided(size, here, to).copy_(source.as_strided(size, there, base + at))
        return flat

    return pack


def _unpacking(whole: Shape, dim: int, shapes: Sequence[Shape]) -> Run:
    """The inverse of :func:`_packing`."""
    if math.prod(whole[:dim]) == 1:
        return lambda flat: flat.view(whole)
    blocks = _blocks(_split(whole, dim, shapes), whole)
    return lambda flat: _unpack(flat, flat.new_empty(whole), blocks)


def _unpack(packed: Tensor, out: Tensor, blocks: Sequence[Block]) -> Tensor:
    for size, there, at, here, to in blocks:
        out.as_strided(size, there, at).copy_(packed.as_strided(size, here, to))
    return out


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _alike(values: Sequence[Shape]) -> bool:
    # Not by a set: sizes may be symbols.
    return all(value == values[0] for value in values)


def _is_run(shape: Shape, whole: Shape) -> bool:
    """Whether a box of that shape is one run of a row-major tensor's memory."""
    cut = [d for d, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
    return not cut or math.prod(shape[: cut[-1]]) == 1
