"""Losses that compare two tensors element by element, then add up or average."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, einop, rule_from, whole
from shardwise_loss.reduction import MEAN, NONE, scaled

__all__ = ["RULES"]

aten = torch.ops.aten


def _same_shape(call: Call) -> bool:
    """Whether the two tensors have one shape: kernels that broadcast them average over different counts."""
    return bool(call.args["self"].shape == call.args["target"].shape)


def _dims(call: Call) -> tuple[str, ...]:
    return tuple(f"...{d}" for d in range(call.args["self"].ndim, 0, -1))


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
