"""An op of this package: torch's 4-bit product for CPU with a weight whose shape says how it is packed.

torch packs the rows of a weight in blocks and gives the bytes the shape ``[n, k / 2]``, where no dim is ``k``. Here the
same bytes have the shape ``[n / b, k, b / 2]``: block, column, pairs of rows. In this shape a weight can be sharded by
``k``, as a row-parallel layer needs it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["block_rows", "int4_linear", "pack"]

aten = torch.ops.aten

_LIBRARY: Any = torch.library.Library("shardwise_quant", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("int4_linear(Tensor x, Tensor packed, Tensor scales_and_zeros, int group_size) -> Tensor")


@cache
def block_rows() -> int:
    """The number of rows that this CPU packs into one block: 64 with AVX512, else 32 or 16. It is found by packing."""
    weight = torch.zeros(64, 2, dtype=torch.int32)
    weight[:, 1] = 1
    flat = aten._convert_weight_to_int4pack_for_cpu.default(weight, 1).flatten()
    # Column 0 of the first block comes before its column 1: half as many bytes as the block has rows.
    return 2 * int(flat.nonzero()[0])


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 0 to 15, int32 ``[n, k]`` on CPU, as uint8 ``[n / b, k, b / 2]`` with ``b = block_rows()``.

    ``n`` must be a multiple of ``b`` and ``k`` be even.
    """
    n, k = weight.shape
    b = block_rows()
    packed: torch.Tensor = aten._convert_weight_to_int4pack_for_cpu.default(weight, 1)
    return packed.view(n // b, k, b // 2)


def int4_linear(x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, group_size: int) -> torch.Tensor:
    """``x @ w.T`` with ``w = (q - 8) * scale + zero``, ``[m, k]`` by ``[n, k]``.

    ``packed`` is ``pack(q)``; ``scales_and_zeros`` is ``[k / group_size, n, 2]`` in the dtype of
    ``x`` (float32, bfloat16 or float16); ``group_size`` is 32, 64, 128 or 256.
    """
    blocks, k, half = packed.shape
    n = 2 * blocks * half
    if 0 in (x.shape[0], n, k):
        return x.new_zeros((x.shape[0], n))
    product: torch.Tensor = aten._weight_int4pack_mm_for_cpu.default(
        x, packed.view(n, k // 2), group_size, scales_and_zeros
    )
    return product


def _meta(x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, group_size: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], 2 * packed.shape[0] * packed.shape[2]))


_LIBRARY.impl("int4_linear", int4_linear, "CPU")
_LIBRARY.impl("int4_linear", _meta, "Meta")
