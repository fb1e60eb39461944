"""Pooling at random or given positions: fractional max pools, and the inverse of a max pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, in_memory_format, labels, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _flow(call: Call, positions: int, linear: str | tuple[()] = ()) -> Flow:
    names = labels(call.args["self"].ndim, whole=range(-positions, 0))
    # The random numbers of a picture without a batch have a batch dim all the same, of size one.
    named = [name for name in names if name]
    numbers: Any = (*(None,) * (2 - len(named)), *named, None)
    inputs = [numbers if name == "random_samples" else names for name in call.operand_names]
    # The kernels refuse planes without channels, and some refuse an empty batch.
    return Flow(inputs, [names], linear=linear, nonempty=named)


@rule_from([aten.max_unpool2d.default, aten.max_unpool2d.out], results=in_memory_format)
def unpool_2d(call: Call) -> Flow:
    """Batch and channels; indices count within a plane. Linear in the values."""
    return _flow(call, 2, "self")


@rule_from([aten.max_unpool3d.default, aten.max_unpool3d.out])
def unpool_3d(call: Call) -> Flow:
    """Batch and channels; indices count within a volume. Linear in the values."""
    return _flow(call, 3, "self")


@rule_from([aten.fractional_max_pool2d.default, aten.fractional_max_pool2d.output])
def fractional_2d(call: Call) -> Flow:
    """Batch and channels, each with random numbers of its own."""
    return _flow(call, 2)


@rule_from([aten.fractional_max_pool3d.default, aten.fractional_max_pool3d.output])
def fractional_3d(call: Call) -> Flow:
    """Batch and channels, each with random numbers of its own."""
    return _flow(call, 3)


@rule_from([aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool2d_backward.grad_input])
def fractional_2d_backward(call: Call) -> Flow:
    """Batch and channels; linear in the gradient."""
    return _flow(call, 2, "grad_output")


def _like_input(_: Tensor, x: Tensor, *__: Any, grad_input: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape) if grad_input is None else grad_input


@rule_from(
    [aten.fractional_max_pool3d_backward.default, aten.fractional_max_pool3d_backward.grad_input], meta=_like_input
)
def fractional_3d_backward(call: Call) -> Flow:
    """Batch and channels; linear in the gradient."""
    return _flow(call, 3, "grad_output")


RULES = (unpool_2d, unpool_3d, fractional_2d, fractional_3d, fractional_2d_backward, fractional_3d_backward)
