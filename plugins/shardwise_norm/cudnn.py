"""The ops of cudnn's batch norm.

cudnn's kernel passes its backward a reserve. Only the kernel knows its size, so no plan can place it. Every row
therefore runs a lowering: torch's own kernel, which needs no reserve, or the synchronised one if several shards share
the statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from shardwise.rule import Call, LocalCall, Rows, rule_from
from shardwise_norm.batch import backward_rows, forward_rows
from shardwise_norm.statistics import is_apart, normalised, pooling, reserve, synchronised_backward

__all__ = ["RULES"]

aten = torch.ops.aten


def _normalise(local: LocalCall, *args: Any) -> tuple[Tensor, ...]:
    training = local.arg("training")
    if args[0].numel() == 0 or is_apart(local) or (training and pooling(local)):
        return normalised(local, *args)
    x, weight, bias, mean, variance, _, momentum, epsilon = args
    result, *saved = aten.native_batch_norm.default(x, weight, bias, mean, variance, training, momentum, epsilon)
    saved = saved if training else [weight.new_empty(0)] * len(saved)
    return (result, *saved, reserve(x))


def _differentiate(local: LocalCall, *args: Any) -> tuple[Tensor | None, ...]:
    if pooling(local):
        return synchronised_backward(local, *args)
    x, gradient, weight, running_mean, running_var, mean, invstd, epsilon, _ = args
    gradients: tuple[Tensor, ...] = aten.native_batch_norm_backward.default(
        gradient, x, weight, running_mean, running_var, mean, invstd, True, epsilon, [True, True, True]
    )
    return gradients


def _lowered(rows: Rows) -> Rows:
    return Rows(tuple(evolve(row, lowered=True) for row in rows.rows))


@rule_from(aten.cudnn_batch_norm.default, lowering=_normalise, writes=("running_mean", "running_var"))
def forward(call: Call) -> Rows:
    """Channels; batch and positions, in training by the statistics of all shards."""
    return _lowered(forward_rows(call, writes=True))


@rule_from(aten.cudnn_batch_norm_backward.default, lowering=_differentiate)
def backward(call: Call) -> Rows:
    """Channels; batch and positions by sums over all shards."""
    return _lowered(backward_rows(call).bind(call))


RULES = (forward, backward)
