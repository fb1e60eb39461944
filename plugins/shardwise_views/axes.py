"""Views that reorder dims, take diagonals or windows, and the backward ops of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.rule import Flow, LocalCall, TensorMeta, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten
ANY_PARTIAL = ("* -> *",)
LINEAR = ("sum -> sum", "avg -> avg")

_Labels = list[str | None]


def _names(ndim: int) -> _Labels:
    return [f"d{i}" for i in range(ndim)]


@rule_from([aten.permute.default, aten.permute_copy.default, aten.permute_copy.out])
def PERMUTE(self: TensorMeta, dims: Sequence[int]) -> Flow:
    """Every dim passes to its new place."""
    names = _names(self.ndim)
    return Flow([names], [[names[d] for d in dims]], partial=ANY_PARTIAL)


@rule_from([aten.transpose.int, aten.transpose_.default, aten.transpose_copy.int, aten.transpose_copy.int_out])
def TRANSPOSE(self: TensorMeta, dim0: int, dim1: int) -> Flow:
    """Every dim passes to its new place."""
    names = _names(self.ndim)
    turned = list(names)
    if names:
        turned[dim0], turned[dim1] = names[dim1], names[dim0]
    return Flow([names], [turned], partial=ANY_PARTIAL)


@rule_from([aten.t.default, aten.t_.default, aten.t_copy.default, aten.t_copy.out])
def T(self: TensorMeta) -> Flow:
    """Every dim passes to its new place."""
    names = _names(self.ndim)
    return Flow([names], [names[::-1]], partial=ANY_PARTIAL)


# -- diagonals ---------------------------------------------------------------------------------------------------


def _around(ndim: int, *dims: int) -> tuple[_Labels, _Labels]:
    """Labels of a tensor of which some dims are whole, and of what is left without them."""
    whole = {d % ndim for d in dims}
    names: _Labels = [None if d in whole else f"d{d}" for d in range(ndim)]
    return names, [name for name in names if name is not None]


@rule_from([aten.diagonal.default, aten.diagonal_copy.default, aten.diagonal_copy.out])
def DIAGONAL(self: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Flow:
    """Dims beside the two of the diagonal pass."""
    names, others = _around(self.ndim, dim1, dim2)
    return Flow([names], [[*others, None]], partial=ANY_PARTIAL)


@rule_from([aten.diag_embed.default, aten.diag_embed.out])
def DIAG_EMBED(self: TensorMeta, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Flow:
    """Dims beside the diagonal pass; the zeros around it are those of every reduction."""
    names, others = _around(self.ndim + 1, dim1, dim2)
    return Flow([[*others, None]], [names], partial=ANY_PARTIAL)


def _local_input_sizes(local: LocalCall) -> Mapping[str, Any]:
    spec = local.outputs[0]
    assert spec is not None
    return {"input_sizes": local.local_shape(spec)}


@rule_from([aten.diagonal_backward.default, aten.diagonal_backward.out], local_args=_local_input_sizes)
def DIAGONAL_BACKWARD(grad_output: TensorMeta, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Flow:
    """Dims beside the two of the diagonal pass; the zeros around it are those of every reduction."""
    names, others = _around(len(input_sizes), dim1, dim2)
    return Flow([[*others, None]], [names], partial=ANY_PARTIAL)


# -- windows -----------------------------------------------------------------------------------------------------


@rule_from([aten.unfold.default, aten.unfold_copy.default, aten.unfold_copy.out])
def UNFOLD(self: TensorMeta, dimension: int) -> Flow:
    """Dims beside the one that windows slide over pass; the window is a new last dim."""
    if not self.ndim:
        return Flow([[]], [[None]], partial=ANY_PARTIAL)
    names, _ = _around(self.ndim, dimension)
    return Flow([names], [[*names, None]], partial=ANY_PARTIAL)


@rule_from([aten.unfold_backward.default, aten.unfold_backward.out], local_args=_local_input_sizes)
def UNFOLD_BACKWARD(grad_in: TensorMeta, input_sizes: Sequence[int], dim: int) -> Flow:
    """Dims beside the one that windows slid over pass; overlaps add up, so only linear partials do."""
    if not input_sizes:
        return Flow([[None]], [[]], partial=LINEAR)
    names, _ = _around(len(input_sizes), dim)
    return Flow([[*names, None]], [names], partial=LINEAR)


RULES = (PERMUTE, TRANSPOSE, T, DIAGONAL, DIAG_EMBED, DIAGONAL_BACKWARD, UNFOLD, UNFOLD_BACKWARD)
