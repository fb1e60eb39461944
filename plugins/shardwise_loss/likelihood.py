"""Negative log likelihood: the batch and positions may be sharded, the classes are whole.

The mean divides by the total weight of the targets, the ignored ones left out. Over a sharded batch that is the
*global* total weight; a mean of the ranks' means would be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, rule_from
from shardwise_loss.reduction import MEAN, NONE

__all__ = ["RULES"]

aten = torch.ops.aten

SUM = 2


def _labels(call: Call) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Dims of the scores (batch, class, positions) and of the targets."""
    ndim = call.args["self"].ndim
    scores = tuple(None if d == min(1, ndim - 1) else f"n{d}" for d in range(ndim))
    return scores, tuple(label for label in scores if label)


def _mean(
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
    """The sum over this rank's samples, joined with the others' and divided by the total weight of all."""
    loss, total = getattr(aten, _packet(local)).default(scores, target, weight, SUM, ignore_index)
    split = local.sharding(local.spec("target"))
    loss, total = local.comm.all_reduce(torch.stack([loss, total]), "sum", split)
    loss = loss / total
    if output is None or total_weight is None:
        return loss, total
    return output.copy_(loss), total_weight.copy_(total)


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
    lowering=_mean,
)
def forward(call: Call) -> Flow:
    """Batch and positions; a sum is pending, a mean is taken over all shards, and so is the total weight then."""
    scores, target = _labels(call)
    reduction = call.args["reduction"]
    return Flow(
        [scores, target, None],
        # Without a reduction there is no total weight, and every rank answers the same zero.
        [target if reduction == NONE else None, None],
        reduce=dict.fromkeys(target, "sum" if reduction == SUM else "R"),
        lowered=target if reduction == MEAN else False,
    )


@rule_from(
    [
        aten.nll_loss_backward.default,
        aten.nll_loss_backward.grad_input,
        aten.nll_loss2d_backward.default,
        aten.nll_loss2d_backward.grad_input,
    ]
)
def backward(call: Call) -> Flow:
    """Batch and positions: the total weight is that of all shards already. Linear in the gradient."""
    scores, target = _labels(call)
    gradient = target if call.args["reduction"] == NONE else None
    rest: list[Any] = [None, None]
    return Flow(
        [gradient, scores, target, *rest],
        [scores],
        partial=["sum, R, R, R, R -> sum", "avg, R, R, R, R -> avg"],
    )


RULES = (forward, backward)
