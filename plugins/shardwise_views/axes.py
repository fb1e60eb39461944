"""Views that reorder dims, take diagonals or windows, and the backward ops of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.rule import Flow, LocalCall, TensorMeta, labels, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


@rule_from([aten.permute.default, aten.permute_copy.default, aten.permute_copy.out])
def PERMUTE(self: TensorMeta, dims: Sequence[int]) -> Flow:
    """Every dim passes to its new place."""
    names = labels(self.ndim)
    return Flow([names], [[names[d] for d in dims]], moves="self")


@rule_from([aten.transpose.int, aten.transpose_.default, aten.transpose_copy.int, aten.transpose_copy.int_out])
def TRANSPOSE(self: TensorMeta, dim0: int, dim1: int) -> Flow:
    """Every dim passes to its new place."""
    names = labels(self.ndim)
    swapped = list(names)
    if names:
        swapped[dim0], swapped[dim1] = names[dim1], names[dim0]
    return Flow([names], [swapped], moves="self")


@rule_from([aten.t.default, aten.t_.default, aten.t_copy.default, aten.t_copy.out])
def T(self: TensorMeta) -> Flow:
    """Every dim passes to its new place."""
    names = labels(self.ndim)
    return Flow([names], [names[::-1]], moves="self")


# -- diagonals ---------------------------------------------------------------------------------------------------


@rule_from([aten.diagonal.default, aten.diagonal_copy.default, aten.diagonal_copy.out])
def DIAGONAL(self: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Flow:
    """All dims but the two of the diagonal pass."""
    names = labels(self.ndim, whole=(dim1, dim2))
    return Flow([names], [[*filter(None, names), None]], moves="self")


@rule_from([aten.diag_embed.default, aten.diag_embed.out])
def DIAG_EMBED(self: TensorMeta, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Flow:
    """All dims but the diagonal pass; the zeros around it stay zeros under every reduction."""
    names = labels(self.ndim + 1, whole=(dim1, dim2))
    return Flow([[*filter(None, names), None]], [names], moves="self")


def _local_input_sizes(local: LocalCall) -> Mapping[str, Any]:
    spec = local.outputs[0]
    assert spec is not None
    return {"input_sizes": local.local_shape(spec)}


@rule_from([aten.diagonal_backward.default, aten.diagonal_backward.out], local_args=_local_input_sizes)
def DIAGONAL_BACKWARD(grad_output: TensorMeta, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Flow:
    """All dims but the two of the diagonal pass; the zeros around it stay zeros under every reduction."""
    names = labels(len(input_sizes), whole=(dim1, dim2))
    return Flow([[*filter(None, names), None]], [names], moves="grad_output")


# -- windows -----------------------------------------------------------------------------------------------------


@rule_from([aten.unfold.default, aten.unfold_copy.default, aten.unfold_copy.out])
def UNFOLD(self: TensorMeta, dimension: int) -> Flow:
    """All dims but the one that windows slide over pass; the window is a new last dim."""
    names = labels(self.ndim, whole={dimension})
    return Flow([names], [[*names, None]], moves="self")


@rule_from([aten.unfold_backward.default, aten.unfold_backward.out], local_args=_local_input_sizes)
def UNFOLD_BACKWARD(grad_in: TensorMeta, input_sizes: Sequence[int], dim: int) -> Flow:
    """All dims but the one that windows slid over pass. Overlaps add up, so it is linear."""
    names = labels(len(input_sizes), whole={dim})
    return Flow([[*names, None]], [names], linear="grad_in")


RULES = (PERMUTE, TRANSPOSE, T, DIAGONAL, DIAG_EMBED, DIAGONAL_BACKWARD, UNFOLD, UNFOLD_BACKWARD)
