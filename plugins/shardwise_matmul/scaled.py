"""Products of low-precision factors: rows may be sharded, the rest is whole.

The distribution ``shardwise-quant`` replaces these rules by ones that shard more. CUDA's kernels need certain multiples
for depths and widths, and at least 17 rows of integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, rule, rule_from, whole

__all__ = ["RULES"]

aten = torch.ops.aten


def _product_on_meta(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:  # noqa: PLR2004  matrices
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied: {tuple(a.shape)} and {tuple(b.shape)}.")
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype or a.dtype)


def _meta(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """The result on the meta device; torch's own meta kernel demands CUDA's multiples of 16 of a CPU too."""
    return _product_on_meta(a, b, out_dtype)


def _meta_v2(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return _product_on_meta(a, b, rest[7])


@rule_from(aten._scaled_mm.default, meta=_meta)
def SCALED_MM(call: Call) -> Flow:
    """Rows pass where the first factor has one scale, or one for each of them; all else is whole.

    It is long because the shape of a scale says what it scales.
    """
    first, scale = call.args["self"], call.args["scale_a"]
    if scale.dtype != torch.float32:  # blocks, in layouts of their own
        return whole(call)
    if scale.shape == (first.shape[0], 1) and first.shape[0] > 1:
        scaled: list[str | None] = ["m", None]
    elif all(n == 1 for n in scale.shape):
        scaled = [None] * scale.ndim
    else:
        return whole(call)
    rest = [None] * (len(call.operands) - 3)
    return Flow([["m", None], None, scaled, *rest], [["m", None]], nonempty={"m"})


@rule_from(aten._scaled_mm_v2.default, meta=_meta_v2)
def SCALED_MM_V2(call: Call) -> Flow:
    """All is whole."""
    return whole(call)


INT_MM = rule([aten._int_mm.default, aten._int_mm.out], "R, R -> R")

RULES = (SCALED_MM, SCALED_MM_V2, INT_MM)
