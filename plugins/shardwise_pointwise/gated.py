"""Rules for ops that are elementwise but for one operand or dim: gated linear units and membership tests."""

from __future__ import annotations

import torch

from shardwise.rule import Flow, TensorMeta, like, rule, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


@rule_from([aten.glu.default, aten.glu.out])
def GLU(self: TensorMeta, dim: int) -> Flow:
    """Every dim but the one whose halves gate each other."""
    return like(self, whole={dim})


@rule_from([aten.glu_backward.default, aten.glu_backward.grad_input])
def GLU_BACKWARD(self: TensorMeta, dim: int) -> Flow:
    """Every dim but the one whose halves gate each other; linear in the gradient."""
    return like(self, whole={dim}, linear="grad_output")


IS_IN = rule(
    [aten.isin.Tensor_Tensor, aten.isin.Tensor_Tensor_out],
    {"elements": "...", "test_elements": "R"},
)
IS_IN_ONE = rule([aten.isin.Tensor_Scalar, aten.isin.Tensor_Scalar_out], "... -> ...")

RULES = (GLU, GLU_BACKWARD, IS_IN, IS_IN_ONE)
