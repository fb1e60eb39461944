"""Products with packed 4-bit weights, and the packing.

Packing moves values between rows and columns inside tiles, so a packed weight may only be cut between tiles:

* CPU, ``[n, k / 2]``: blocks of 64, 32 or 16 rows (by instruction set) follow each other, each with ``[k, rows / 2]``
  bytes. A multiple of 64 rows is a number of whole blocks on every CPU. This shape has no dim ``k``. The same bytes as
  ``[n / b, k, b / 2]`` have one; :func:`shardwise_quant.blocked.int4_linear` takes that shape.
* CUDA, ``[n / 8, k / (16 t), 32, t / 2]`` with ``t`` inner tiles: ``n`` and ``k`` are dims, in units of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, Rows, TensorMeta, linear, rule_from
from shardwise_quant import blocked

__all__ = ["RULES"]

aten = torch.ops.aten

# So many rows are whole blocks on every CPU that torch packs for (aten/src/ATen/native/cpu/int4mm_kernel.cpp).
CPU_ROWS = 64
# Rows and columns of one tile of CUDA's packing (aten/src/ATen/native/cuda/int4mm.cu).
CUDA_ROWS, CUDA_COLUMNS = 8, 16

# Linear in the activations, and in scales and zeros together: a weight is q * scale + zero.
LINEAR = (linear("self|x"), linear("qScaleAndZeros|scales_and_zeros"))


def _cut(name: str, pieces: int, size: int) -> Any:
    """The label of a dim of ``size`` that may be cut into a divisor of ``pieces``; ``None`` if it must be whole."""
    if pieces < 1 or size % pieces:
        return None
    return ((name, pieces), (f"{name}_within", size // pieces))


def _flow(inputs: Any, outputs: Any, **options: Any) -> Flow:
    """A flow in which the inside of a tile is whole."""
    named = {name for dims in inputs for label in dims or () if isinstance(label, tuple) for name, _ in label[1:]}
    return Flow(inputs, outputs, replicate=named, **options)


# -- CPU ---------------------------------------------------------------------------------------------------------


@rule_from(aten._convert_weight_to_int4pack_for_cpu.default)
def PACK_FOR_CPU(self: TensorMeta) -> Flow:
    """Named dims n k -> n _; n is cut between blocks of 64 rows, k is whole."""
    rows = _rows(self.shape[0])
    return _flow([[rows, None]], [[rows, None]])


@rule_from(aten._weight_int4pack_mm_for_cpu.default)
def MM_FOR_CPU(self: TensorMeta, mat2: TensorMeta) -> Flow:
    """Named dims m k, n _, _ n _ -> m n; n is cut between blocks of 64 rows, k is whole."""
    rows = _rows(mat2.shape[0])
    return _flow([["m", None], [rows, None], [None, rows, None]], [["m", rows]], partial=LINEAR)


def _rows(n: int) -> Any:
    return None if n % CPU_ROWS else _cut("n", n // CPU_ROWS, n)


def _int4_linear(
    local: LocalCall, x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    return blocked.int4_linear(x.contiguous(), packed.contiguous(), scales_and_zeros.contiguous(), group_size)


@rule_from(torch.ops.shardwise_quant.int4_linear.default, lowering=_int4_linear)
def BLOCKED_MM(
    x: TensorMeta, packed: TensorMeta, scales_and_zeros: TensorMeta, group_size: int
) -> Callable[[Call], Rows] | Flow:
    """Named dims m (g _), n (g _) _, g (n _) _ -> m (n _): whole blocks of rows, whole groups of columns."""
    blocks, columns, width = packed.shape
    groups = scales_and_zeros.shape[0]
    rows, k = _cut("n", blocks, 2 * width * blocks), _cut("k", groups, columns)
    return _flow(
        [["m", k], ["n" if rows else None, k, None], ["k" if k else None, rows, None]],
        [["m", rows]],
        reduce={"k": "sum"},
        partial=LINEAR,
        lowered=("*", "R"),
    )


# -- CUDA --------------------------------------------------------------------------------------------------------


@rule_from(aten._convert_weight_to_int4pack.default)
def PACK_FOR_CUDA(self: TensorMeta, innerKTiles: int) -> Flow | Rows:  # noqa: N803  the op's own name
    """Named dims (n 8) (k _) -> n k _ _; whole tiles, and no row where n is not a multiple of 8."""
    n, halves = self.shape
    if n % CUDA_ROWS:
        # The device rounds the number of tiles up and the meta device rounds it down, so the shape is not known.
        return Rows(())
    rows = _cut("n", n // CUDA_ROWS, n)
    columns = _cut("k", 2 * halves // (CUDA_COLUMNS * innerKTiles), halves)
    return _flow([[rows, columns]], [["n" if rows else None, "k" if columns else None, None, None]])


def _mm_for_cuda(local: LocalCall, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    if not x.shape[0]:  # the kernel cannot be launched without a row
        return x.new_empty((0, rest[0].shape[0] * CUDA_ROWS))
    product: torch.Tensor = local.call.op(x.contiguous(), *rest)
    return product


def _meta_for_cuda(x: torch.Tensor, weight: torch.Tensor, group_size: int, scales: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], scales.shape[1]))


# torch's own meta kernel accepts fake tensors only (2.13).
@rule_from(aten._weight_int4pack_mm.default, lowering=_mm_for_cuda, meta=_meta_for_cuda)
def MM_FOR_CUDA(self: TensorMeta, mat2: TensorMeta, qGroupSize: int, qScaleAndZeros: TensorMeta) -> Flow:  # noqa: N803
    """Named dims m (k _), n (k _) _ _, (k _) (n 8) _ -> m (n 8); k in tiles that are whole groups as well.

    It is long because the notation cannot say this: a piece of k must be whole in three units at once (tiles, groups,
    columns), which follow from the sizes of the call.
    """
    columns = self.shape[1]
    tiles, n = mat2.shape[0], mat2.shape[0] * CUDA_ROWS
    if mat2.ndim != 4:  # noqa: PLR2004  CUDA's packing; other devices pack otherwise
        return Flow([None, None, None], [None])
    rows = _cut("n", tiles, n)
    step = lcm(qGroupSize, 2 * CUDA_COLUMNS * mat2.shape[3])
    pieces = columns // step if columns % step == 0 else 0
    x, packed, scales = (_cut("k", pieces, size) for size in (columns, mat2.shape[1], qScaleAndZeros.shape[0]))
    if None in (x, packed, scales):
        x = packed = scales = None
    return _flow(
        [["m", x], ["n" if rows else None, packed, None, None], [scales, rows, None]],
        [["m", rows]],
        reduce={"k": "sum"},
        partial=LINEAR,
        lowered=("*", "R"),
    )


RULES = (PACK_FOR_CPU, MM_FOR_CPU, BLOCKED_MM, PACK_FOR_CUDA, MM_FOR_CUDA)
