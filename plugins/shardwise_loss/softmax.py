"""Softmax and its backward: every dim but the one that sums to one."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, like, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


@rule_from(
    [
        aten._softmax.default,
        aten._softmax.out,
        aten._log_softmax.default,
        aten._log_softmax.out,
        aten._safe_softmax.default,
    ]
)
def forward(call: Call) -> Flow:
    """Any dim but the softmax dim."""
    return like(call.args["self"], whole=[call.args["dim"]])


@rule_from(
    [
        aten._softmax_backward_data.default,
        aten._softmax_backward_data.out,
        aten._log_softmax_backward_data.default,
        aten._log_softmax_backward_data.out,
    ]
)
def backward(call: Call) -> Flow:
    """Any dim but the softmax dim; linear in the gradient."""
    return like(call.args["output"], whole=[call.args["dim"]], partial=["sum, R -> sum", "avg, R -> avg"])


RULES = (forward, backward)
