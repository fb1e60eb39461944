"""Negative log likelihood: batch, positions and classes may be sharded.

Of sharded classes every rank looks up the targets that are its own and passes over the others, so the scores stay
where they are. The mean divides by the total weight of the targets, the ignored ones left out. Over a sharded batch
that is the *global* total weight; a mean of the ranks' means would be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, rule_from
from shardwise_loss.classes import own_classes
from shardwise_loss.reduction import MEAN, NONE

__all__ = ["RULES"]

aten = torch.ops.aten

SUM = 2


Labels = tuple[str, ...]


def _labels(call: Call) -> tuple[Labels, Labels]:
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
    loss, total = getattr(aten, _packet(local)).default(*own[:3], SUM if reduction == MEAN else reduction, own[3])
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
    found = (
        # The kernel for positions takes no other strides, and a part may have others than the whole.
        getattr(aten, _packet(local)).default(
            gradient, scores.contiguous(), target, weight, reduction, ignored, total_weight
        )
        if scores.numel()
        else torch.zeros_like(scores)
    )
    return found if grad_input is None else grad_input.copy_(found)


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
)
def forward(call: Call) -> Flow:
    """Batch, positions and classes; a sum is partial, a mean is taken over all shards, and so is the total weight."""
    scores, target = _labels(call)
    reduction = call.args["reduction"]
    if reduction == NONE and not target:
        # The kernels take one sample without a batch for a sum.
        reduction = SUM
    if reduction == NONE:
        # Without a reduction there is no total weight, and every rank answers the same zero.
        looked_up = "v, R, v -> sum, R"
        return Flow(
            [scores, target, ("v",)],
            [target, None],
            reduce=dict.fromkeys(target, "R"),
            partial=[looked_up],
            lowered=[looked_up],
        )
    return Flow(
        [scores, target, ("v",)],
        [None, None],
        reduce=dict.fromkeys((*target, "v"), "sum" if reduction == SUM else "R"),
        lowered=(*target, "v") if reduction == MEAN else ["v"],
    )


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
    """Batch, positions and classes: the total weight is that of all shards already. Linear in the gradient."""
    scores, target = _labels(call)
    gradient = target if call.args["reduction"] == NONE else None
    return Flow(
        [gradient, scores, target, ("v",), None],
        [scores],
        lowered=["v"],
        partial=["sum, R, R, R, R -> sum", "avg, R, R, R, R -> avg"],
    )


RULES = (forward, backward)
