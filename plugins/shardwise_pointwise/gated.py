"""Rules for ops that are elementwise but for one operand or dim: gated linear units, membership tests, log sigmoid."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, Flow, TensorMeta, einop, labels, like, row_major, rule_from

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


# Neither op below has a meta kernel.
def _as_glu(glu: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(glu)


def _as_x(grad_x: torch.Tensor, grad_glu: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x)


@rule_from([aten.glu_jvp.default, aten.glu_jvp.out], meta=_as_glu)
def GLU_JVP(x: TensorMeta, dim: int) -> Flow:
    """As ``glu``; linear in the tangent."""
    return like(x, whole={dim}, linear="dx")


@rule_from([aten.glu_backward_jvp.default, aten.glu_backward_jvp.out], meta=_as_x)
def GLU_BACKWARD_JVP(x: TensorMeta, dim: int) -> Flow:
    """As ``glu_backward``; linear in both tangents together."""
    return like(x, whole={dim})


@rule_from([aten.isin.Tensor_Tensor, aten.isin.Tensor_Tensor_out], results=row_major)
def IS_IN(elements: TensorMeta, test_elements: TensorMeta) -> Flow:  # whole
    """Any dim of the elements; what they are compared with is whole."""
    return Flow([labels(elements.ndim), None], [labels(elements.ndim)])


@rule_from([aten.isin.Tensor_Scalar, aten.isin.Tensor_Scalar_out], results=row_major)
def IS_IN_ONE(elements: TensorMeta) -> Flow:
    """Any dim."""
    return like(elements)


def _kept(call: Call, device_type: str) -> list[TensorMeta | None]:
    """On CUDA nothing is kept for the backward pass (aten/src/ATen/native/cuda/Activation.cpp); on the CPU all is
    row-major.
    """
    result, buffer = row_major(call, device_type)
    if device_type != "cuda" or call.out_operands or buffer is None:
        return [result, buffer]
    return [result, TensorMeta.contiguous((0,), buffer.dtype)]


@rule_from([aten.log_sigmoid_forward.default, aten.log_sigmoid_forward.output], results=_kept)
def LOG_SIGMOID(call: Call) -> Flow:
    """Any dim; what is kept for the backward pass follows, where it is not empty."""
    x, buffer = call.args["self"], call.outputs[1]
    names = labels(x.ndim)
    if buffer is not None and buffer.shape == x.shape:
        return Flow([names], [names, names])
    return Flow([names], [names, None], reduce={name: "R" for name in names if name})


@rule_from([aten.log_sigmoid_backward.default, aten.log_sigmoid_backward.grad_input])
def LOG_SIGMOID_BACKWARD(call: Call) -> Flow:
    """Any dim; linear in the gradient."""
    x, buffer = call.args["self"], call.args["buffer"]
    if buffer.shape == (0,) != x.shape:
        names = labels(x.ndim)
        return Flow([names, names, None], [names], linear="grad_output")
    plain = einop("... -> ...")(call)
    return Flow(plain.inputs, plain.outputs, linear="grad_output")


RULES = (GLU, GLU_BACKWARD, GLU_JVP, GLU_BACKWARD_JVP, IS_IN, IS_IN_ONE, LOG_SIGMOID, LOG_SIGMOID_BACKWARD)
