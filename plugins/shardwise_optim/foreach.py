"""The elementwise ``_foreach`` ops, by the facts that hold for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from shardwise.rule import Op, Rule, affine, linear, moves, rule
from shardwise_optim.positions import at_each_position, overloads

__all__ = ["RULES"]

UNARY = """
    _foreach_abs _foreach_acos _foreach_asin _foreach_atan _foreach_ceil _foreach_cos _foreach_cosh _foreach_erf
    _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac _foreach_lgamma _foreach_log _foreach_log10
    _foreach_log1p _foreach_log2 _foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid _foreach_sign
    _foreach_sin _foreach_sinh _foreach_sqrt _foreach_tan _foreach_tanh _foreach_trunc
"""
# A partial sum divided by zero gives infinities of both signs, so division takes no partial sum.
BINARY = """
    _foreach_div _foreach_pow _foreach_clamp_max _foreach_clamp_min _foreach_maximum _foreach_minimum _foreach_addcdiv
"""

# Facts by the number of lists: a scalar, and a tensor that all positions share, are whole, and taken for finite.
# Elements of a list of factors may be infinite, and parts of both signs times infinity add up to NaN: no partial sum is
# multiplied by them.
NEGATION = {1: [linear("self")]}
SUMS = {1: [affine("self")], 2: [linear("self other") + affine("self", "other")]}
PRODUCTS = {1: [linear("self")]}
# Not affine in the weights: torch has a formula for small ones and one for large ones, and for infinities one gives NaN
# where the other does not.
LERP = {2: [linear("self tensors1") + affine("self", "tensors1")]}
ADDCMUL = {3: [affine("self")]}
# The old content does not matter. In place, its placement does.
COPIES = {2: [moves("self src", "src")]}
MOVES = {1: [moves("self")]}


def _matrices() -> tuple[Rule, ...]:
    """Rules of ops that torch has from 2.12 on."""
    mm = getattr(torch.ops.aten, "_foreach_mm", None)
    if mm is None:
        return ()
    return (rule(mm.default, "m k, k n -> m n", reduce={"k": "sum"}, linear=("self", "mat2"), zip_lists=True),)


# On the meta device these refuse a tensor of scalars, which must be on the CPU.
BY_SCALARS = (torch.ops.aten._foreach_addcmul.Tensor, torch.ops.aten._foreach_addcdiv.Tensor)


def _like_self(tensors: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], _: Tensor) -> list[Tensor]:
    return list(torch.ops.aten._foreach_addcmul.Scalar(tensors, first, second))


def _except_by_scalars(names: str) -> list[Op]:
    return [op for op in overloads(names) if op not in BY_SCALARS]


RULES = (
    at_each_position(overloads(UNARY)),
    at_each_position(_except_by_scalars(BINARY)),
    evolve(at_each_position(BY_SCALARS[:1], ADDCMUL), meta=_like_self),
    evolve(at_each_position(BY_SCALARS[1:]), meta=_like_self),
    at_each_position(overloads("_foreach_neg"), NEGATION),
    at_each_position(overloads("_foreach_add _foreach_sub"), SUMS),
    at_each_position(overloads("_foreach_mul"), PRODUCTS),
    at_each_position(overloads("_foreach_lerp"), LERP),
    at_each_position(_except_by_scalars("_foreach_addcmul"), ADDCMUL),
    at_each_position(overloads("_foreach_copy"), COPIES),
    at_each_position(overloads("_foreach_zero _foreach_clone"), MOVES),
    *_matrices(),
)
