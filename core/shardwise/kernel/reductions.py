"""The algebra of ``Partial``: neutral values, which reductions commute, and what dtypes and backends support."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from shardwise.errors import LayoutError

__all__ = [
    "SENDABLE",
    "LINEAR",
    "REDUCE_OPS",
    "REAL",
    "add_up",
    "average",
    "as_sendable",
    "is_native",
    "neutral",
    "reduce_pieces",
    "reduce_stacked",
    "scaled_down",
]

#: Reductions of equal values that give this value.
IDEMPOTENT_KINDS = frozenset({"avg", "max", "min"})


def reduce_pieces(pieces: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce the partial pieces of all ranks of one mesh dim to one tensor. All have the same shape and dtype.

    A bool sum is a logical or, and a bool product a logical and. An integer average is rounded towards zero. Max and
    min propagate NaN, as ``torch.amax`` does. Floating sums are computed in float64.

    Raises :class:`LayoutError` for a reduction that the dtype lacks: see :func:`reducible`.
    """
    return reduce_stacked(torch.stack(list(pieces)), kind)


def reduce_stacked(stacked: Tensor, kind: str) -> Tensor:
    """As :func:`reduce_pieces`, for pieces that are stacked along dim 0."""
    dtype = stacked.dtype
    _refuse_unless(reducible(kind, dtype), kind, dtype)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return _reduce_unsigned(stacked, kind)
    if dtype == torch.bool:
        return stacked.any(0) if kind in ("sum", "max") else stacked.all(0)
    if kind in ("max", "min"):
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    if kind == "product":
        wide = torch.float64 if dtype.is_floating_point else dtype
        return reduce(_times, stacked.unbind(0)) if dtype.is_complex else stacked.prod(0, dtype=wide).to(dtype)
    return _added(stacked, kind)


def _added(stacked: Tensor, kind: str) -> Tensor:
    """The sum or the average over dim 0."""
    dtype = stacked.dtype
    # torch.sum starts from +0, so it would lose -0. Backends start from the first piece.
    if dtype.is_complex:
        # Torch's sum of complex numbers multiplies by alpha, which mixes the zeros of their parts.
        return torch.view_as_complex(_added(torch.view_as_real(stacked.resolve_conj()), kind))
    if not dtype.is_floating_point:
        return _whole_average(stacked) if kind == "avg" else stacked.sum(0, dtype=dtype)
    pieces = stacked.to(torch.float64)
    if kind == "avg":
        return average(reduce(torch.add, scaled_down(pieces, len(pieces)).unbind(0)), len(pieces)).to(dtype)
    return reduce(torch.add, pieces.unbind(0)).to(dtype)


def _whole_average(stacked: Tensor) -> Tensor:
    """The average of integers over dim 0, rounded towards zero.

    No sum overflows: quotients and rests are added apart.
    """
    size, wide = len(stacked), stacked.long()
    quotients = wide.div(size, rounding_mode="floor")
    rest = (wide - quotients * size).sum(0)
    floor = quotients.sum(0) + rest.div(size, rounding_mode="floor")
    return (floor + ((floor < 0) & (rest % size != 0))).to(stacked.dtype)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """A product of complex numbers, in which 1 changes nothing.

    Torch's product mixes both parts, so 1 times an infinite number has NaN, and 1 times a zero may lose its sign.
    """
    return torch.where(y == 1, x, torch.where(x == 1, y, x * y))


def _reduce_unsigned(stacked: Tensor, kind: str) -> Tensor:
    """Torch has no reductions of these dtypes. As int64 the narrow ones have room, and 64 bits wrap around in the same
    way. They compare in the same way with their first bit flipped.
    """
    if stacked.dtype != torch.uint64:
        return reduce_stacked(stacked.long(), kind).to(stacked.dtype)
    flip = torch.iinfo(torch.int64).min if kind in ("max", "min") else 0
    reduced: Tensor = reduce_stacked(stacked.view(torch.int64) ^ flip, kind) ^ flip
    return reduced.view(stacked.dtype)


def _refuse_unless(legal: bool, kind: str, dtype: torch.dtype) -> None:
    if not legal:
        raise LayoutError(
            asked=f"reduce a partial {kind} of {dtype}",
            found=f"{dtype} has no {kind}",
            do="Cast the tensor first, or use another placement.",
            kind=kind,
            dtype=str(dtype),
        )


def neutral(kind: str, dtype: torch.dtype) -> complex | float | int | bool:
    """The value that changes nothing under a reduction: 1 for a product, the lowest value for a max, for a sum 0.

    A sum of floating or complex numbers has -0.0: adding +0.0 would turn -0.0 into +0.0.

    Raises :class:`LayoutError` for avg, which has none, and for max or min of complex numbers.
    """
    if kind == "product":
        return 1
    if kind == "sum":
        return complex(-0.0, -0.0) if dtype.is_complex else -0.0 if dtype.is_floating_point else 0
    _refuse_unless(kind != "avg" and not dtype.is_complex, kind, dtype)
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)


def add_up(stacked: Tensor) -> Tensor:
    """The sum over dim 0 in the dtype of the pieces, which backends can add too. Halves are added in float32."""
    dtype = stacked.dtype
    if dtype.is_complex:
        return torch.view_as_complex(add_up(torch.view_as_real(stacked)))
    if not dtype.is_floating_point:
        return stacked.sum(0, dtype=dtype)
    # Not torch.sum: see reduce_stacked.
    first, *others = stacked.unbind(0)
    total = first.to(torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype, copy=True)
    for piece in others:
        total += piece
    return total.to(dtype)


#: Reductions that commute with addition and with multiplication by a constant.
LINEAR = frozenset({"sum", "avg"})


def commute(kind: str, other: str, dtype: torch.dtype) -> bool:
    """Whether two reductions give the same in either order. Averages of integers never do, because they are rounded."""
    if "avg" in (kind, other) and not (dtype.is_floating_point or dtype.is_complex):
        return False
    return kind == other or (kind in LINEAR and other in LINEAR)


def reducible(kind: str, dtype: torch.dtype) -> bool:
    """Whether a dtype has a reduction. Bools and uint64 have no average, and complex numbers have no max or min."""
    if dtype in (torch.bool, torch.uint64):
        return kind != "avg"
    return not (dtype.is_complex and kind in ("max", "min"))


#: The reductions that a partial tensor may have.
REDUCE_OPS: tuple[str, ...] = ("sum", "avg", "max", "min", "product")

SENDABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""The dtypes that both gloo and NCCL send and add."""

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""By a complex dtype, the dtype of its real and imaginary parts. Backends add these."""


def is_native(kind: str, dtype: torch.dtype) -> bool:
    """Whether a backend's own reduction gives the right numbers. The max and min of backends drop NaN.

    An average in float16 has no room: its pieces overflow when they are added, and lose bits when they are scaled down.
    The pieces of an average of integers overflow, too.
    """
    if dtype in REAL:
        return kind in ("sum", "avg")
    if kind == "avg" and (dtype == torch.float16 or not dtype.is_floating_point):
        return False
    return dtype in SENDABLE and (kind in ("sum", "avg", "product") or not dtype.is_floating_point)


def _scale(size: int) -> int:
    """The least power of two that is not less than a number of pieces."""
    return 1 << (size - 1).bit_length()


def scaled_down(pieces: Tensor, size: int) -> Tensor:
    """The pieces of an average over ``size`` ranks as they are added up: the sum of finite numbers is finite.

    They are divided by a power of two, which rounds nothing, and :func:`average` takes it into account.
    """
    if pieces.is_complex():
        return torch.view_as_complex(torch.view_as_real(pieces) / _scale(size))
    return pieces / _scale(size)


def average(total: Tensor, size: int) -> Tensor:
    """The average, in place, from the sum of ``size`` pieces that were :func:`scaled_down`; not of integers."""
    if total.is_complex():
        # A complex quotient would add products with an imaginary zero, and lose signs of zeros.
        torch.view_as_real(total).div_(size / _scale(size))
        return total
    return total.div_(size / _scale(size))


def as_sendable(flat: Tensor) -> Tensor:
    """The same memory in a dtype that backends can send; ``flat`` is contiguous and has a dim."""
    # Of a tensor of one element torch calls any stride contiguous, and only stride 1 may be seen as octets.
    return flat if flat.dtype in SENDABLE else flat.as_strided(flat.shape, (1,)).view(torch.uint8)
