"""Comparisons, logic and the bits of integers. No partial tensor passes."""

from __future__ import annotations

from shardwise_pointwise.elementwise import elementwise

__all__ = ["RULES"]

INTEGERS = "gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift"
OPERATORS = "__and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__"
COMPARISONS = "eq ne lt le gt ge isnan isinf isfinite isneginf isposinf"
LOGIC = "logical_and logical_or logical_xor logical_not"

RULES = (elementwise(f"{INTEGERS} {OPERATORS} {COMPARISONS} {LOGIC}"),)
