"""The elementwise ``_foreach`` ops, by the partial tensors that pass through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from shardwise.rule import Op, Rule, rule
from shardwise_optim.positions import at_each_position, overloads

__all__ = ["RULES"]

UNARY = """
    _foreach_abs _foreach_acos _foreach_asin _foreach_atan _foreach_ceil _foreach_cos _foreach_cosh _foreach_erf
    _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac _foreach_lgamma _foreach_log _foreach_log10
    _foreach_log1p _foreach_log2 _foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid _foreach_sign
    _foreach_sin _foreach_sinh _foreach_sqrt _foreach_tan _foreach_tanh _foreach_trunc
"""
# A partial sum divided by zero gives infinities of both signs, so division passes none.
BINARY = """
    _foreach_div _foreach_pow _foreach_clamp_max _foreach_clamp_min _foreach_maximum _foreach_minimum _foreach_addcdiv
"""

# Partial rows have a word per list: a scalar, and a tensor that all positions share, are whole.
LINEAR = ("sum -> sum", "avg -> avg")
SUMS = ("sum, sum -> sum", "avg, avg -> avg", "avg, R -> avg", "R, avg -> avg")
PRODUCTS = ("sum, R -> sum", "avg, R -> avg", "R, sum -> sum", "R, avg -> avg")
LERP = (*SUMS, "sum, sum, R -> sum", "avg, avg, R -> avg", "avg, R, R -> avg", "R, avg, R -> avg", "R, R, avg -> avg")
ADDCMUL = (
    *("sum, sum, R -> sum", "sum, R, sum -> sum", "avg, avg, R -> avg", "avg, R, avg -> avg"),
    *("avg, R, R -> avg", "R, avg, R -> avg", "R, R, avg -> avg"),
)
# The old content does not matter, but in place its placement does.
COPIES = tuple(f"{old}, {kind} -> {kind}" for kind in ("sum", "avg", "max", "min", "product") for old in (kind, "R"))


def _matrices() -> tuple[Rule, ...]:
    """Rules of ops that came with torch 2.12."""
    mm = getattr(torch.ops.aten, "_foreach_mm", None)
    if mm is None:
        return ()
    partial = ("sum, R -> sum", "R, sum -> sum", "avg, R -> avg", "R, avg -> avg")
    return (rule(mm.default, "m k, k n -> m n", reduce={"k": "sum"}, partial=partial, zip_lists=True),)


# On the meta device these refuse a tensor of scalars, which they want on the CPU.
BY_SCALARS = (torch.ops.aten._foreach_addcmul.Tensor, torch.ops.aten._foreach_addcdiv.Tensor)


def _like_self(tensors: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], _: Tensor) -> list[Tensor]:
    return list(torch.ops.aten._foreach_addcmul.Scalar(tensors, first, second))


def _but(names: str) -> list[Op]:
    return [op for op in overloads(names) if op not in BY_SCALARS]


RULES = (
    at_each_position(overloads(UNARY)),
    at_each_position(_but(BINARY)),
    evolve(at_each_position(BY_SCALARS[:1], ADDCMUL), meta=_like_self),
    evolve(at_each_position(BY_SCALARS[1:]), meta=_like_self),
    at_each_position(overloads("_foreach_neg"), LINEAR),
    at_each_position(overloads("_foreach_add _foreach_sub"), ("avg -> avg", *SUMS)),
    at_each_position(overloads("_foreach_mul"), (*LINEAR, *PRODUCTS)),
    at_each_position(overloads("_foreach_lerp"), LERP),
    at_each_position(_but("_foreach_addcmul"), ADDCMUL),
    at_each_position(overloads("_foreach_copy"), COPIES),
    at_each_position(overloads("_foreach_zero _foreach_clone"), ("* -> *",)),
    *_matrices(),
)
