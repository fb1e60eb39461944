"""Negative log likelihood: batch, positions and classes may be sharded.

Where classes are sharded, each rank looks up the targets that are among its own classes and skips the others, so the
scores do not move. A mean divides by the total weight of the targets that are not ignored. Over a sharded batch that is
the *global* total weight: a mean of the ranks' means would be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, neutral, row_major, rule_from
from shardwise_loss.classes import own_classes, refusal_of_target
from shardwise_loss.reduction import MEAN, NONE

__all__ = ["RULES"]

aten = torch.ops.aten

SUM = 2  # a value of ATen's ``reduction`` argument, beside MEAN and NONE


def _labels(call: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dims of the scores (batch, class, positions) and of the targets."""
    ndim = call.args["self"].ndim
    scores = tuple("v" if d == min(1, ndim - 1) else f"n{d}" for d in range(ndim))
    return scores, tuple(label for label in scores if label != "v")


def _shared(
    local: LocalCall,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    *,
    output: Tensor | None = None,
    total_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of the targets of this rank's samples and classes; a mean is over the total weight of all."""
    own = own_classes(local, scores, target, weight, ignore_index)
    try:
        loss, total = getattr(aten, _packet(local)).default(*own[:3], SUM if reduction == MEAN else reduction, own[3])
    except IndexError as error:
        raise refusal_of_target(error, local, target, ignore_index) from error
    if reduction == NONE and own[1] is not target:
        # Another rank has the class: add what changes no sum.
        loss.masked_fill_((own[1] == own[3]) & (target != ignore_index), neutral("sum", loss.dtype))
    if reduction == MEAN:
        split = local.sharding(local.spec("self"))
        loss, total = local.comm.all_reduce(torch.stack([loss, total]), "sum", split)
        loss = loss / total
    if output is None or total_weight is None:
        return loss, total
    return output.copy_(loss), total_weight.copy_(total)


def _scattered(local: LocalCall, gradient: Tensor, scores: Tensor, *args: Any, grad_input: Any = None) -> Tensor:
    """The gradient by the scores of this rank's classes, of which only the targets' own are not zero."""
    target, weight, reduction, ignore_index, total_weight = args
    _, target, weight, ignored = own_classes(local, scores, target, weight, ignore_index)
    by_scores = (
        # The kernel for positions takes no other strides, and a part may have others than the whole.
        getattr(aten, _packet(local)).default(
            gradient, scores.contiguous(), target, weight, reduction, ignored, total_weight
        )
        if scores.numel()
        else torch.zeros_like(scores)
    )
    return by_scores if grad_input is None else grad_input.copy_(by_scores)


def _packet(local: LocalCall) -> str:
    """The name of the op without its overload: ``nll_loss_forward``."""
    return str(local.call.op).split(".")[1]


@rule_from(
    [
        aten.nll_loss_forward.default,
        aten.nll_loss_forward.output,
        aten.nll_loss2d_forward.default,
        aten.nll_loss2d_forward.output,
    ],
    lowering=_shared,
    results=row_major,
)
def forward(call: Call) -> Flow:
    """Batch, positions and classes; a sum is partial, a mean and the total weight are whole after an exchange."""
    # Long because these are three rules, one for each reduction. "R" as a reduction: every rank has the whole value.
    scores, target = _labels(call)
    inputs = [scores, target, ("v",)]
    reduction = call.args["reduction"]
    if reduction == MEAN:
        # The lowering adds up losses and weights over the shards of any dim, and divides.
        return Flow(
            inputs, [None, None], reduce=dict.fromkeys((*target, "v"), "R"), lowered=(*target, "v"), scattered=target
        )
    if reduction == SUM or not target:
        # A single sample without a batch is summed by the kernels, whatever the reduction.
        return Flow(inputs, [None, None], reduce=dict.fromkeys((*target, "v"), "sum"), lowered="v")
    # Each target has a loss of its own. The total weight is zero on every rank.
    return Flow(inputs, [target, None], reduce=dict.fromkeys(target, "R"), lowered="v, R, v -> sum, R")


@rule_from(
    [
        aten.nll_loss_backward.default,
        aten.nll_loss_backward.grad_input,
        aten.nll_loss2d_backward.default,
        aten.nll_loss2d_backward.grad_input,
    ],
    lowering=_scattered,
)
def backward(call: Call) -> Flow:
    """Batch, positions and classes; the total weight is that of all shards. Linear in the gradient."""
    scores, target = _labels(call)
    gradient = target if call.args["reduction"] == NONE else None
    return Flow(
        [gradient, scores, target, ("v",), None],
        [scores],
        lowered="v",
        linear="grad_output",
    )


RULES = (forward, backward)
