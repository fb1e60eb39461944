"""Softmax and its backward: any dim may be sharded; shards of the softmax dim exchange their maxima and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, Rows, labels, like, row_major, rule_from, whole
from shardwise_loss.shared_dim import log_softmax, log_softmax_backward, safe_softmax, softmax, softmax_backward

__all__ = ["RULES"]

aten = torch.ops.aten


def _rows(flow: Flow, call: Call) -> Rows:
    """Rows that exchange come after those that do not, and before the whole row."""
    rows = flow.bind(call).rows
    return Rows((*sorted(rows[:-1], key=lambda row: row.lowered), rows[-1]))


def _along(call: Call, name: str) -> list[str]:
    ndim = call.args[name].ndim
    return [f"d{call.args['dim'] % ndim}"] if ndim else []


def _forward(call: Call) -> Rows:
    """Any dim; the shards of the softmax dim exchange their maxima and sums."""
    return _rows(like(call.args["self"], lowered=_along(call, "self"), scattered="*"), call)


def _backward(call: Call) -> Rows:
    """Any dim; the shards of the softmax dim exchange their sums. Linear in the gradient."""
    flow = like(call.args["output"], linear="grad_output", lowered=_along(call, "output"), scattered="*")
    return _rows(flow, call)


def _like_first(x: Tensor, *_: Any, out: Tensor | None = None) -> Tensor:
    """These have no meta kernel."""
    return x.new_empty(x.shape) if out is None else out


@rule_from(
    [
        aten._masked_softmax.default,
        aten._masked_softmax.out,
        aten._masked_softmax_backward.default,
        aten._masked_softmax_backward.out,
    ],
    meta=_like_first,
)
def masked(call: Call) -> Flow:
    """Any dim but the softmax dim, where the mask has the shape of the scores; CUDA's kernel takes no empty shard."""
    scores, mask, dim = call.operands[0], call.args["mask"], call.args["dim"]
    if scores is None or scores.shape != mask.shape or not scores.ndim:
        return whole(call)
    names = labels(scores.ndim, [-1 if dim is None else dim])
    return Flow([names], [names], nonempty=[name for name in names if name is not None])


RULES = (
    masked,
    rule_from([aten._softmax.default, aten._softmax.out], lowering=softmax)(_forward),
    rule_from([aten._log_softmax.default, aten._log_softmax.out], lowering=log_softmax)(_forward),
    rule_from(aten._safe_softmax.default, lowering=safe_softmax)(_forward),
    rule_from([aten._softmax_backward_data.default, aten._softmax_backward_data.out], lowering=softmax_backward)(
        _backward
    ),
    rule_from(
        [aten._log_softmax_backward_data.default, aten._log_softmax_backward_data.out],
        lowering=log_softmax_backward,
        results=row_major,
    )(_backward),
)
