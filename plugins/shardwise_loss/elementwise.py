"""Losses that compare two tensors element by element, then add up or average."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rule import Call, Flow, TensorMeta, einop, like_operand, row_major, rule_from, whole
from shardwise_loss.reduction import MEAN, NONE, scaled

__all__ = ["RULES"]

aten = torch.ops.aten


def _same_shape(call: Call) -> bool:
    """Whether the two tensors have one shape: kernels that broadcast them average over different counts."""
    return bool(call.args["self"].shape == call.args["target"].shape)


def _dims(call: Call) -> tuple[str, ...]:
    return tuple(f"...{d}" for d in range(call.args["self"].ndim, 0, -1))


def _losses(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Losses of probabilities lie as the probabilities do."""
    is_of_probabilities = call.op is aten.binary_cross_entropy.default and call.args["reduction"] == NONE
    return like_operand(call, "self") if is_of_probabilities else call.outputs


_ROW_MAJOR = {
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
}


def _gradients(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Gradients of losses of differences are row-major, and those of probabilities lie as the probabilities do."""
    if call.op is aten.binary_cross_entropy_backward.default:
        return like_operand(call, "self")
    return row_major(call, device_type) if call.op in _ROW_MAJOR else call.outputs


@rule_from(
    [
        aten.mse_loss.default,
        aten.mse_loss.out,
        aten.smooth_l1_loss.default,
        aten.smooth_l1_loss.out,
        aten.huber_loss.default,
        aten.huber_loss.out,
        aten.soft_margin_loss.default,
        aten.soft_margin_loss.out,
        aten.binary_cross_entropy.default,
        # Not its out=: torch's kernel reduces a scratch copy of the wrong shape and answers wrongly.
        aten.binary_cross_entropy_with_logits.default,
        aten.binary_cross_entropy_with_logits.out,
    ],
    lowering=scaled,
    results=_losses,
)
def forward(call: Call) -> Flow:
    """Any dim; a sum or mean over a sharded one is a partial sum."""
    dims, reduction = _dims(call), call.args["reduction"]
    if not _same_shape(call):
        return whole(call)
    flow = einop("... -> ...")(call)
    if reduction == NONE:
        return flow
    lowered = dims if reduction == MEAN else ()
    return Flow(flow.inputs, [None], reduce=dict.fromkeys(dims, "sum"), lowered=lowered, scattered="*")


@rule_from(
    [
        aten.mse_loss_backward.default,
        aten.mse_loss_backward.grad_input,
        aten.smooth_l1_loss_backward.default,
        aten.smooth_l1_loss_backward.grad_input,
        aten.huber_loss_backward.default,
        aten.huber_loss_backward.out,
        aten.soft_margin_loss_backward.default,
        aten.soft_margin_loss_backward.grad_input,
        aten.binary_cross_entropy_backward.default,
        aten.binary_cross_entropy_backward.grad_input,
    ],
    lowering=scaled,
    results=_gradients,
)
def backward(call: Call) -> Flow:
    """Any dim; linear in the gradient."""
    dims, reduction = _dims(call), call.args["reduction"]
    if not _same_shape(call):
        return Flow([None], [None], linear="grad_output")
    flow = einop("... -> ...")(call)
    lowered = dims if reduction == MEAN else ()
    return Flow(flow.inputs, flow.outputs, linear="grad_output", lowered=lowered, scattered="*")


RULES = (forward, backward)
