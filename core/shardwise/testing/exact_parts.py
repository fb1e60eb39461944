"""Parts of floating-point values that add up to them without any rounding, in whatever order they are added.

A value with few binary digits is a multiple of a step that is far above the rounding of its dtype. Parts that are
multiples of that step, too, and not many times larger than the value, have sums that all fit the dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["exact_pieces", "few_digits", "steps"]

# Per dtype the binary digits of a value, and the largest part in steps. The step of a value below 2 ** e is
# 2 ** (e - digits). Parts on eight ranks, of sums and averages over up to three mesh dims, fill the dtype's own digits.
_DIGITS = {torch.float64: (36, 2**39), torch.float32: (12, 2**14), torch.float16: (5, 2**5), torch.bfloat16: (3, 2**3)}
# Values with a larger binary exponent than the dtype's largest number less this are not split into larger parts.
_ROOM = 8


def few_digits(value: Tensor) -> Tensor:
    """The value rounded to as many binary digits as exact parts need; with the same strides. Other dtypes than
    floating and complex ones are returned as they are.
    """
    if value.is_complex():
        return torch.view_as_complex(few_digits(torch.view_as_real(value.resolve_conj())))
    if value.dtype not in _DIGITS:
        return value
    # The memory as a whole: strides may leave gaps, or use an element many times.
    size = value.untyped_storage().nbytes() // value.dtype.itemsize
    memory = value.as_strided((size,), (1,), 0).double()
    step = _steps(memory, value.dtype)
    few = torch.where(memory.isfinite() & (step > 0), torch.round(memory / step) * step, memory).to(value.dtype)
    return few.as_strided(value.shape, value.stride(), value.storage_offset())


def steps(value: Tensor, ranks: int) -> Tensor | None:
    """For each element of a value with few digits, what its parts on so many ranks are multiples of, as float64; 0
    where there is no room for other parts than the value and zeros. With a last dim of 2 for complex numbers.

    ``None`` for dtypes without such parts.
    """
    if value.is_complex():
        return steps(torch.view_as_real(value.resolve_conj()), ranks)
    if value.dtype not in _DIGITS:
        return None
    step = _steps(value.double(), value.dtype)
    room = math.log2(torch.finfo(value.dtype).max) - _ROOM
    # An average over some of the ranks divides sums of parts by odd numbers, too.
    return torch.where(value.abs().double() < 2.0**room, step * (ranks // (ranks & -ranks)), 0.0)


def _steps(value: Tensor, dtype: torch.dtype) -> Tensor:
    exponent = torch.frexp(value.nan_to_num(0, 0, 0)).exponent
    least = torch.finfo(dtype)
    return _power_of_two(exponent - _DIGITS[dtype][0]).clamp(min=least.smallest_normal * least.eps)


def _power_of_two(exponent: Tensor) -> Tensor:
    """As float64, exactly: a kernel of ``pow`` may round."""
    return (exponent.long().clamp(-1022, 1023) + 1023 << 52).view(torch.float64)


def exact_pieces(value: Tensor, kind: str, count: int, generator: torch.Generator, step: Tensor) -> list[Tensor]:
    """``count`` random tensors whose sum or average is ``value``: exact parts of it, or of one of its own parts."""
    if value.is_complex():
        real = exact_pieces(torch.view_as_real(value.resolve_conj()), kind, count, generator, step)
        return [torch.view_as_complex(piece) for piece in real]
    reach = _DIGITS[value.dtype][1]
    whole = value.double()
    noise = torch.randint(-reach, reach + 1, (count - 1, *value.shape), generator=generator)
    # As in every split: -0 is the sum of -0 only.
    is_negative_zero = (value == 0) & value.signbit()
    loose = torch.where(is_negative_zero, -0.0, noise * step)
    rest = torch.where(is_negative_zero, -0.0, whole - loose.sum(0))
    parts = [*(whole + loose), rest] if kind == "avg" else [*loose, rest]
    return [part.to(value.dtype) for part in parts]
