"""What process groups carry and reduce themselves: the same for gloo and NCCL, so that all ranks plan alike.

And what to make of the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CARRIED", "REAL", "average", "carrier", "is_native"]

CARRIED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
"""What gloo and NCCL both carry and add up."""

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtype as which a complex one is added up."""


def is_native(kind: str, dtype: torch.dtype) -> bool:
    """Whether a backend's own reduction by a pending kind gives the right numbers; backends' max and min drop NaN."""
    if dtype in REAL:
        return kind in ("sum", "avg")
    return dtype in CARRIED and (kind in ("sum", "avg", "product") or not dtype.is_floating_point)


def average(total: Tensor, size: int) -> Tensor:
    """Divide in place; an integer average is cut towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(size)
    return total.div_(size, rounding_mode="trunc")


def carrier(flat: Tensor) -> Tensor:
    """The same memory in a dtype that backends carry; ``flat`` is contiguous and has a dim."""
    return flat if flat.dtype in CARRIED else flat.view(torch.uint8)
