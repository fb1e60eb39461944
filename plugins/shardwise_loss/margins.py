"""Margin losses over classes: the batch may be sharded, the classes are whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, rule_from
from shardwise_loss.reduction import MEAN, NONE, scaled

__all__ = ["RULES"]

aten = torch.ops.aten

BATCHED = 2  # the dims of scores with a batch


def _labels(call: Call) -> dict[str, tuple[str | None, ...] | None]:
    """Dims by operand; without a batch everything is whole."""
    if call.args["self"].ndim < BATCHED:
        return {}
    target = ("n", None) if call.args["target"].ndim == BATCHED else ("n",)
    return {"self": ("n", None), "target": target, "is_target": ("n", None)}


def _reduced(call: Call, outputs: list[Any]) -> Flow:
    dims, reduction = _labels(call), call.args["reduction"]
    return Flow(
        [dims.get(name) for name in call.operand_names],
        outputs if dims else [None] * len(outputs),
        reduce={} if reduction == NONE else {"n": "sum"},
        lowered="n" if reduction == MEAN else (),
        scattered="n",
        nonempty=["n"] if dims else [],
    )


@rule_from([aten.multi_margin_loss.default, aten.multi_margin_loss.out], lowering=scaled)
def multi_margin(call: Call) -> Flow:
    """Batch; a sum or mean is a partial sum."""
    return _reduced(call, [("n",) if call.args["reduction"] == NONE else None])


def _scaled_first(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    loss, is_target = local.call.op(*args, **kwargs)
    spec = local.spec("self")
    return loss.mul_(local.local_shape(spec)[0] / spec.shape[0]), is_target


@rule_from(
    [aten.multilabel_margin_loss_forward.default, aten.multilabel_margin_loss_forward.output], lowering=_scaled_first
)
def multilabel_margin(call: Call) -> Flow:
    """Batch; a sum or mean is a partial sum."""
    return _reduced(call, [("n",) if call.args["reduction"] == NONE else None, ("n", None)])


def _like_scores(_: Tensor, scores: Tensor, *__: Any, grad_input: Tensor | None = None) -> Tensor:
    """The backwards have no meta kernel."""
    return scores.new_empty(scores.shape) if grad_input is None else grad_input


@rule_from(
    [
        aten.multi_margin_loss_backward.default,
        aten.multi_margin_loss_backward.grad_input,
        aten.multilabel_margin_loss_backward.default,
        aten.multilabel_margin_loss_backward.grad_input,
    ],
    lowering=scaled,
    meta=_like_scores,
)
def backward(call: Call) -> Flow:
    """Batch; linear in the gradient.

    It is long because the reduction decides whether the gradient has a batch, and a single sample has none.
    """
    dims, reduction = _labels(call), call.args["reduction"]
    inputs = [dims.get(name) for name in call.operand_names]
    if dims and reduction == NONE:
        inputs[0] = ("n",)
    return Flow(
        inputs,
        [dims.get("self")],
        linear="grad_output",
        lowered="n" if reduction == MEAN else (),
        scattered="n",
        nonempty=["n"] if dims else [],
    )


RULES = (multi_margin, multilabel_margin, backward)
