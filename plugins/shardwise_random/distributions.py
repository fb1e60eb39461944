"""What the random ops draw: each distribution by place in the global tensor, and by one of torch's generators.

The values by place follow torch's own definitions (aten/src/ATen/core/TransformationHelper.h and
native/DistributionTemplates.h): on which side an interval is open, and what range a dtype has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import Draw, Region

__all__ = [
    "Distribution",
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal",
    "uniform",
    "whole",
]


@frozen
class Distribution:
    """How a tensor is filled: ``in_place(tensor, generator=...)`` by torch, or with ``values(draw, region, dtype,
    device)``, of the region's size or broadcasting to it. Both take parameters that fit this rank's part.
    """

    in_place: Callable[..., Any]
    values: Callable[[Draw, Region, torch.dtype, torch.device], Tensor]

    def fill(self, tensor: Tensor, draw: Draw, region: Region) -> Tensor:
        """Fill this rank's part of a draw."""
        # On no elements torch draws nothing, and refuses parameters that it would refuse.
        self.in_place(tensor.new_empty(0), generator=None)
        if not draw.by_place:
            return self._by_torch(tensor, draw, region)
        return tensor.copy_(self.values(draw, region, tensor.dtype, tensor.device))

    def _by_torch(self, tensor: Tensor, draw: Draw, region: Region) -> Tensor:
        if tensor.numel():
            # Ranks whose shards start at one place hold one shard.
            self.in_place(tensor, generator=draw.generator(tensor.device, region.offset))
        return tensor


def uniform(low: float = 0.0, high: float = 1.0) -> Distribution:
    """On ``[low, high)``, also where rounding to the dtype would reach ``high``."""

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = draw.uniform(region, dtype, device)
        if (low, high) == (0.0, 1.0):
            return found
        found = (found.to(_computed(dtype)) * (high - low) + low).to(dtype)
        return torch.where(found >= high, low, found)

    return Distribution(lambda tensor, generator: tensor.uniform_(low, high, generator=generator), values)


def normal(mean: Any = 0.0, std: Any = 1.0) -> Distribution:
    """Normal values; mean and standard deviation are numbers or tensors."""

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        found: Tensor = draw.normal(region, dtype, device) * std + mean
        return found

    def in_place(tensor: Tensor, generator: torch.Generator | None) -> Any:
        if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
            return tensor.normal_(mean, std, generator=generator)
        return tensor.normal_(generator=generator).mul_(std).add_(mean) if tensor.numel() else tensor

    return Distribution(in_place, values)


def bernoulli(probability: float | Tensor) -> Distribution:
    """1 with a probability, else 0."""

    def in_place(tensor: Tensor, generator: torch.Generator | None) -> Any:
        if isinstance(probability, Tensor) and not tensor.numel():
            return tensor
        return tensor.bernoulli_(probability, generator=generator)

    return Distribution(in_place, lambda draw, region, _, device: draw.below(region, probability, device))


def exponential(rate: float = 1.0) -> Distribution:
    """Exponential values, never 0."""
    return Distribution(
        lambda tensor, generator: tensor.exponential_(rate, generator=generator),
        lambda draw, region, dtype, device: draw.positive(region, dtype, device).log_().mul_(-1 / rate),
    )


def cauchy(median: float = 0.0, sigma: float = 1.0) -> Distribution:
    """Cauchy values, by the tangent of a uniform angle."""

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        angle = draw.positive(region, dtype, device).sub_(0.5).mul_(math.pi)
        return angle.tan_().mul_(sigma).add_(median)

    return Distribution(lambda tensor, generator: tensor.cauchy_(median, sigma, generator=generator), values)


def log_normal(mean: float = 1.0, std: float = 2.0) -> Distribution:
    """The exponential of normal values."""
    return Distribution(
        lambda tensor, generator: tensor.log_normal_(mean, std, generator=generator),
        lambda draw, region, dtype, device: draw.normal(region, dtype, device).mul_(std).add_(mean).exp_(),
    )


def geometric(probability: float) -> Distribution:
    """The number of the first success, from 1 on; in float64, since tensors of whole numbers hold large ones."""

    def values(draw: Draw, region: Region, _: torch.dtype, device: torch.device) -> Tensor:
        found = draw.positive(region, torch.float64, device).log_()
        return found.div_(math.log1p(-probability)).ceil_().clamp_(min=1)

    return Distribution(lambda tensor, generator: tensor.geometric_(probability, generator=generator), values)


def whole(dtype: torch.dtype, low: int = 0, high: int | None = None) -> Distribution:
    """Whole numbers from ``low`` to ``high - 1``, or to the largest that a dtype holds without a gap."""
    end = _gapless(dtype) + 1 if high is None else high

    def in_place(tensor: Tensor, generator: torch.Generator | None) -> Any:
        if high is None and low == 0:
            return tensor.random_(generator=generator)
        return tensor.random_(low, high, generator=generator)

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        return draw.integers(region, low, _exclusive(end, dtype), device)

    return Distribution(in_place, values)


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _digits(dtype: torch.dtype) -> int:
    return 1 - int(math.log2(torch.finfo(dtype).eps))


def _gapless(dtype: torch.dtype) -> int:
    """The largest whole number of a dtype up to which it holds all."""
    if dtype is torch.bool:
        return 1
    return 1 << _digits(dtype) if dtype.is_floating_point else torch.iinfo(dtype).max


def _exclusive(end: int, dtype: torch.dtype) -> int:
    """Where a range of whole numbers ends so that none is rounded up to ``end`` in a dtype."""
    if not dtype.is_floating_point or int(torch.tensor(float(end - 1), dtype=dtype)) < end:
        return end
    return end - (1 << (end.bit_length() - 1 - _digits(dtype) + 1))
