"""Rules for fake quantization, which rounds each element to a grid: of training that is aware of quantization.

Torch has no meta kernels for most of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Flow, TensorMeta, labels, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _with_mask(self: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def _alone(self: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(self)


def _gradients(_: Tensor, self: Tensor, scale: Tensor, zero_point: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(self), torch.empty_like(scale), torch.empty_like(zero_point)


@rule_from(aten.fake_quantize_per_tensor_affine_cachemask.default, meta=_with_mask)
def BY_NUMBERS(self: TensorMeta) -> Flow:
    """Elementwise."""
    return Flow([labels(self.ndim)], [labels(self.ndim)])


@rule_from(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, meta=_with_mask)
def BY_TENSORS(self: TensorMeta) -> Flow:
    """Elementwise; the tensors that say what the grid is are whole."""
    return Flow([labels(self.ndim), None, None, None], [labels(self.ndim)])


@rule_from(aten._fake_quantize_learnable_per_tensor_affine.default, meta=_alone)
def BY_LEARNT_TENSORS(self: TensorMeta) -> Flow:
    """Elementwise; the tensors that say what the grid is are whole."""
    return Flow([labels(self.ndim), None, None], [labels(self.ndim)])


def _by_channel(self: TensorMeta, axis: int) -> Flow:
    """Elementwise; a sharded channel has its own part of the scales and zero points, whose extremes are checked."""
    names = labels(self.ndim)
    channels = [names[axis]]
    return Flow([names, channels, channels], [names], nonempty=filter(None, channels))


BY_CHANNEL = rule_from(aten.fake_quantize_per_channel_affine_cachemask.default, meta=_with_mask)(_by_channel)
BY_LEARNT_CHANNEL = rule_from(aten._fake_quantize_learnable_per_channel_affine.default, meta=_alone)(_by_channel)


@rule_from(
    [
        aten._fake_quantize_learnable_per_tensor_affine_backward.default,
        aten._fake_quantize_learnable_per_channel_affine_backward.default,
    ],
    meta=_gradients,
)
def LEARN() -> Flow:
    """Whole: the gradient of the grid is of all elements."""
    return Flow([None], [None])


@rule_from(aten._fused_moving_avg_obs_fq_helper.default)
def OBSERVE() -> Flow:
    """Whole: the extremes that move the grid are of all elements."""
    return Flow([None], [None])


RULES = (BY_NUMBERS, BY_TENSORS, BY_LEARNT_TENSORS, BY_CHANNEL, BY_LEARNT_CHANNEL, LEARN, OBSERVE)
