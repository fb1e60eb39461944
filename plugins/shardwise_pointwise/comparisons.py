"""Comparisons, logic and the bits of integers. No partial tensor passes."""

from __future__ import annotations

import torch

from shardwise_pointwise.elementwise import elementwise

__all__ = ["RULES"]

aten = torch.ops.aten

INTEGERS = "gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift"
OPERATORS = "__and__ __or__ __xor__ __iand__ __ior__ __ixor__"
COMPARISONS = "eq ne lt le gt ge isnan isinf isfinite isneginf isposinf"
LOGIC = "logical_and logical_or logical_xor logical_not"

# On the meta device torch refuses bools for these operators, which its kernels take; the functions have their dtypes.
SHIFTS = {
    "__lshift__": aten.bitwise_left_shift,
    "__rshift__": aten.bitwise_right_shift,
    "__ilshift__": aten.bitwise_left_shift_,
    "__irshift__": aten.bitwise_right_shift_,
}

RULES = (
    elementwise(f"{INTEGERS} {OPERATORS} {COMPARISONS} {LOGIC}"),
    *(elementwise(name, meta=function) for name, function in SHIFTS.items()),
)
