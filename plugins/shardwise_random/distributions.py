"""What the random ops draw: each distribution by position in the global tensor, and by one of torch's generators.

The values by position follow torch's own definitions (aten/src/ATen/core/TransformationHelper.h and
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
    "integers",
    "log_normal",
    "normal",
    "uniform",
]


@frozen
class Distribution:
    """How a tensor is filled: by torch's ``in_place(tensor, generator=...)``, or with values by position.

    ``values(draw, region, dtype, device)`` have the region's size or broadcast to it. Both take parameters that fit
    this rank's part.
    """

    in_place: Callable[..., Any]
    values: Callable[[Draw, Region, torch.dtype, torch.device], Tensor]

    def fill(self, tensor: Tensor, draw: Draw, region: Region) -> Tensor:
        """Fill this rank's part of a draw."""
        # On a tensor without elements torch draws nothing, and still refuses wrong parameters.
        self.in_place(tensor.new_empty(0), generator=None)
        if draw.by_place:
            return tensor.copy_(self.values(draw, region, tensor.dtype, tensor.device))
        if tensor.numel():
            # Ranks whose shards start at the same position hold the same shard.
            self.in_place(tensor, generator=draw.generator(tensor.device, region.offset))
        return tensor


def uniform(low: float = 0.0, high: float = 1.0) -> Distribution:
    """On ``[low, high)``, also where rounding to the dtype would reach ``high``."""

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        unit = draw.uniform(region, dtype, device)
        if (low, high) == (0.0, 1.0):
            return unit
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        scaled = (unit.to(wide) * (high - low) + low).to(dtype)
        return torch.where(scaled >= high, low, scaled)

    return Distribution(lambda tensor, generator: tensor.uniform_(low, high, generator=generator), values)


def normal(mean: Any = 0.0, std: Any = 1.0) -> Distribution:
    """Normal values; mean and standard deviation are numbers or tensors."""

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        scaled: Tensor = draw.normal(region, dtype, device) * std + mean
        return scaled

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
    """The number of the first success, from 1 on; computed in float64, since integer tensors hold large values."""

    def values(draw: Draw, region: Region, _: torch.dtype, device: torch.device) -> Tensor:
        logarithm = draw.positive(region, torch.float64, device).log_()
        return logarithm.div_(math.log1p(-probability)).ceil_().clamp_(min=1)

    return Distribution(lambda tensor, generator: tensor.geometric_(probability, generator=generator), values)


def integers(dtype: torch.dtype, low: int = 0, high: int | None = None) -> Distribution:
    """Integers from ``low`` to ``high - 1``; without ``high``, to the last before the dtype's first gap."""
    end = _gapless(dtype) + 1 if high is None else high

    def in_place(tensor: Tensor, generator: torch.Generator | None) -> Any:
        if high is None and low == 0:
            return tensor.random_(generator=generator)
        return tensor.random_(low, high, generator=generator)

    def values(draw: Draw, region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
        return draw.integers(region, low, _exclusive(end, dtype), device)

    return Distribution(in_place, values)


def _digits(dtype: torch.dtype) -> int:
    return 1 - int(math.log2(torch.finfo(dtype).eps))


def _gapless(dtype: torch.dtype) -> int:
    """The largest integer such that the dtype holds every one up to it."""
    if dtype is torch.bool:
        return 1
    return 1 << _digits(dtype) if dtype.is_floating_point else torch.iinfo(dtype).max


def _exclusive(end: int, dtype: torch.dtype) -> int:
    """The end of a range of integers, lowered so that the dtype rounds no integer of the range up to ``end``."""
    if not dtype.is_floating_point or int(torch.tensor(float(end - 1), dtype=dtype)) < end:
        return end
    return end - (1 << (end.bit_length() - 1 - _digits(dtype) + 1))
