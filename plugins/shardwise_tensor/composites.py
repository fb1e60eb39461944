"""Ops that torch writes in terms of others, and that make tensors of no operand on the way.

Their parts have the rules. What they make (a range of classes, a causal mask, an identity) is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["INSTEAD", "MAKING"]

aten = torch.ops.aten

MAKING = (
    aten._scaled_dot_product_attention_math.default,
    aten.combinations.default,
    aten.ctc_loss.IntList,
    aten.istft.default,
    aten.linalg_matrix_power.default,
    aten.linalg_matrix_rank.atol_rtol_float,
    aten.linalg_matrix_rank.atol_rtol_tensor,
    aten.linalg_matrix_rank.default,
    aten.linalg_matrix_rank.tol_tensor,
    aten.linalg_vander.default,
    aten.matrix_power.default,
    aten.nanquantile.default,
    aten.nanquantile.scalar,
    aten.one_hot.default,
    aten.quantile.default,
    aten.quantile.scalar,
    aten.trace_backward.default,
)


def _mvlgamma(x: Tensor, p: int) -> Tensor:
    """The sum of ``lgamma(x + (1 - j) / 2)`` for j of 1 to p, and ``p (p - 1) / 4 log pi``: torch's gradient formula
    for the op adds a plain range.
    """
    if p < 1:
        raise RuntimeError("p has to be greater than or equal to 1")
    terms = [torch.lgamma(x + (1 - j) / 2) for j in range(1, p + 1)]
    return sum(terms[1:], start=terms[0]) + p * (p - 1) / 4 * math.log(math.pi)


def _tensor_split(x: Tensor, where: Tensor, dim: int = 0) -> list[Tensor]:
    """The numbers are read on every rank; torch's kernel reads them from memory that a MeshTensor does not have."""
    return list(torch.tensor_split(x, where.tolist(), dim))


INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.mvlgamma.default: _mvlgamma,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
}
