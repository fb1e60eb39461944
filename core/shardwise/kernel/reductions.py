"""The algebra of ``Partial``: neutral values, what commutes, what a dtype has, what a backend reduces by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.errors import LayoutError

__all__ = [
    "SENDABLE",
    "LINEAR",
    "REDUCE_OPS",
    "REAL",
    "average",
    "as_sendable",
    "is_native",
    "neutral",
    "reduce_pieces",
    "reduce_stacked",
]

#: Kinds for which every rank may hold the same value and the reduced value is that value.
IDEMPOTENT_KINDS = frozenset({"avg", "max", "min"})


def reduce_pieces(pieces: Sequence[Tensor], kind: str) -> Tensor:
    """One tensor from the partial pieces of all ranks of one mesh dim, all of one shape and dtype.

    A bool sum is a logical or, a bool product a logical and; an integer average is cut towards zero. Max and min
    hand NaN on, as ``torch.amax`` does. Floating sums are taken in float64.
    """
    return reduce_stacked(torch.stack(list(pieces)), kind)


def reduce_stacked(stacked: Tensor, kind: str) -> Tensor:
    """As :func:`reduce_pieces`, of pieces that are stacked along dim 0 already."""
    dtype = stacked.dtype
    if dtype == torch.bool:
        _refuse_unless(kind != "avg", kind, dtype)
        return stacked.any(0) if kind in ("sum", "max") else stacked.all(0)
    if kind in ("max", "min"):
        _refuse_unless(not dtype.is_complex, kind, dtype)
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    wide = torch.float64 if dtype.is_floating_point else dtype
    if kind == "product":
        return stacked.prod(0, dtype=wide).to(dtype)
    total = stacked.sum(0, dtype=wide)
    if kind == "avg":
        rounding = None if dtype.is_floating_point or dtype.is_complex else "trunc"
        total = torch.div(total, len(stacked), rounding_mode=rounding)
    return total.to(dtype)


def _refuse_unless(legal: bool, kind: str, dtype: torch.dtype) -> None:
    if not legal:
        raise LayoutError(
            asked=f"reduce a partial {kind} of {dtype}",
            found=f"{dtype} has no {kind}",
            do="Cast the tensor first, or use another placement.",
            kind=kind,
            dtype=str(dtype),
        )


def neutral(kind: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing under a reduction: 0 for sum, 1 for product, the lowest value for max.

    Raises :class:`LayoutError` for avg, which has none, and for max or min of complex numbers.
    """
    if kind in ("sum", "product"):
        return int(kind == "product")
    _refuse_unless(kind != "avg" and not dtype.is_complex, kind, dtype)
    if dtype == torch.bool:
        return kind == "min"
    if dtype.is_floating_point:
        return float("-inf") if kind == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return int(limits.min if kind == "max" else limits.max)


LINEAR = frozenset({"sum", "avg"})


def commute(kind: str, other: str, dtype: torch.dtype) -> bool:
    """Whether reducing by two reductions gives the same in either order: averages of integers are cut off."""
    if "avg" in (kind, other) and not (dtype.is_floating_point or dtype.is_complex):
        return False
    return kind == other or (kind in LINEAR and other in LINEAR)


def reducible(kind: str, dtype: torch.dtype) -> bool:
    """Whether a reduction can be reduced in a dtype: bools have no average, complex numbers no order."""
    if dtype == torch.bool:
        return kind != "avg"
    return not (dtype.is_complex and kind in ("max", "min"))


REDUCE_OPS: tuple[str, ...] = ("sum", "avg", "max", "min", "product")

SENDABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""What gloo and NCCL both carry and add up."""

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtype as which a complex one is added up."""


def is_native(kind: str, dtype: torch.dtype) -> bool:
    """Whether a backend's own reduction by a reduction gives the right numbers; backends' max and min drop NaN."""
    if dtype in REAL:
        return kind in ("sum", "avg")
    return dtype in SENDABLE and (kind in ("sum", "avg", "product") or not dtype.is_floating_point)


def average(total: Tensor, size: int) -> Tensor:
    """Divide in place; an integer average is cut towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(size)
    return total.div_(size, rounding_mode="trunc")


def as_sendable(flat: Tensor) -> Tensor:
    """The same memory in a dtype that backends carry; ``flat`` is contiguous and has a dim."""
    return flat if flat.dtype in SENDABLE else flat.view(torch.uint8)
