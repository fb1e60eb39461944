"""Ops that torch composes of other ops, and that create new tensors on the way.

Their parts have the rules. The new tensor (a range of classes, a causal mask, an identity) is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CREATING", "INSTEAD"]

aten = torch.ops.aten

CREATING = (
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
    aten.quantile.default,
    aten.quantile.scalar,
    aten.trace_backward.default,
)


def _mvlgamma(x: Tensor, p: int) -> Tensor:
    """The sum of ``lgamma(x + (1 - j) / 2)`` for j of 1 to p, plus ``p (p - 1) / 4 log pi``.

    torch's own gradient formula for the op adds a plain tensor, which no rank may do.
    """
    if p < 1:
        raise RuntimeError("p has to be greater than or equal to 1")
    terms = [torch.lgamma(x + (1 - j) / 2) for j in range(1, p + 1)]
    return sum(terms[1:], start=terms[0]) + p * (p - 1) / 4 * math.log(math.pi)


def _tensor_split(x: Tensor, where: Tensor, dim: int = 0) -> list[Tensor]:
    """Every rank reads the numbers; torch's kernel reads them from memory that a MeshTensor does not have."""
    return list(torch.tensor_split(x, where.tolist(), dim))


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """A comparison with a range, as torch has it for tensor classes, and the checks that torch leaves out there."""
    if x.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if x.numel() == 0 and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if x.numel():
        # Both have one value on every rank, so every rank raises.
        torch.ops.aten._assert_async.msg(x.min() >= 0, "Class values must be non-negative.")
        if num_classes == -1:
            num_classes = int(x.max().item()) + 1
        else:
            torch.ops.aten._assert_async.msg(x.max() < num_classes, "Class values must be smaller than num_classes.")
    classes = x.new_ones([num_classes]).cumsum(0) - 1  # made of an operand, so that it lies on the mesh
    return (x.unsqueeze(-1) == classes).to(torch.int64)


def _lstm(*args: Any) -> Any:
    """Without oneDNN, whose kernel for a whole layer hides the products that have rules."""
    one_dnn: Any = torch.backends.mkldnn
    if not one_dnn.enabled:
        return NotImplemented
    one_dnn.enabled = False
    try:
        return aten.lstm.input(*args) if isinstance(args[3], bool) else aten.lstm.data(*args)
    finally:
        one_dnn.enabled = True


INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.lstm.data: _lstm,
    aten.lstm.input: _lstm,
    aten.mvlgamma.default: _mvlgamma,
    aten.one_hot.default: _one_hot,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
}
