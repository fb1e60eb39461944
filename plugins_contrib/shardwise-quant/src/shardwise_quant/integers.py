"""Products with 8-bit integers: both factors (``_int_mm``), or the weight alone (``_weight_int8pack_mm``).

A kernel may accept the size of the whole tensor and refuse the size of a shard, or read past its end. The lowerings pad
such a shard with zeros, which add nothing to a product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.rule import LocalCall, linear, rule
from shardwise_quant.padding import padded, up

__all__ = ["RULES"]

aten = torch.ops.aten

# What _int_mm accepts by device type: (least number of rows, divisor of k, divisor of the columns). CUDA asks for more
# than 16 rows and multiples of 8 (aten/src/ATen/native/cuda/Blas.cpp).
INT_MM_TAKES: Mapping[str, tuple[int, int, int]] = {"cuda": (17, 8, 8)}
# torch's CPU kernel for bfloat16 steps through k by 16 on AVX512 (by 8 on AVX2 and NEON). For other sizes it reads past
# the end of the row (aten/src/ATen/native/cpu/int8mm_kernel.cpp). CUDA's kernel steps by one.
PACK_STEP = 16


def _int_mm(
    local: LocalCall, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    m, k, n = *left.shape, right.shape[1]
    if 0 in (m, k, n):
        return left.new_zeros((m, n), dtype=torch.int32) if out is None else out.zero_()
    rows, inner, columns = INT_MM_TAKES.get(left.device.type, (1, 1, 1))
    tall, deep, wide = max(m, rows), up(k, inner), up(n, columns)
    if (tall, deep, wide) == (m, k, n):
        written = {} if out is None else {"out": out}
        product: torch.Tensor = local.call.op(left, right, **written)
        return product
    product = aten._int_mm.default(padded(left, (tall, deep)), padded(right, (deep, wide)))[:m, :n]
    return product.contiguous() if out is None else out.copy_(product)


# Integer sums are exact, so a sharded k gives the same bits. No operand may be partial: a sum of 8-bit integers may
# wrap round, while the 32-bit product does not.
INT_MM = rule(
    [aten._int_mm.default, aten._int_mm.out],
    "m k, k n -> m n",
    reduce={"k": "sum"},
    lowering={("*", "R"): _int_mm},
    replaces="shardwise",
)


def _int8pack(local: LocalCall, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    (m, k), n = x.shape, weight.shape[0]
    if 0 in (m, k, n):
        return x.new_zeros((m, n))
    deep = k if x.device.type == "cuda" else up(k, PACK_STEP)
    # All row-major: the CPU kernel takes the row stride of x to be k, and the stride of the scales to be one.
    product: torch.Tensor = aten._weight_int8pack_mm.default(
        padded(x, (m, deep)), padded(weight, (n, deep)), scales.contiguous()
    )
    return product


INT8PACK = rule(
    aten._weight_int8pack_mm.default,
    "m k, n k, n -> m n",
    reduce={"k": "sum"},
    # Linear in each floating operand: the activations and the scales.
    partial=[linear("self"), linear("scales")],
    lowering={("*", "R"): _int8pack},
)

RULES = (INT_MM, INT8PACK)
