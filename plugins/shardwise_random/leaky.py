"""The rule for rectified units whose slope for negative values is drawn in training (``rrelu``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import LocalCall, rule
from shardwise_random.distributions import uniform
from shardwise_random.whole import gather, like_whole, part, rehearse

__all__ = ["RULES"]

aten = torch.ops.aten


def rectify(
    local: LocalCall,
    self: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    """The units with this rank's part of the slopes, which go into ``noise``: 1 where a value is positive."""
    if local.without_data(self) or not training:
        if training:
            rehearse(local, self=self)
        result = torch.where(self <= 0, self * ((lower + upper) / 2), self)
    else:
        draw = local.draw() if generator is None else None
        if draw is None:
            # torch draws a slope for each value that is not positive, in memory order: a draw depends on all values.
            spec, noise_spec = local.spec("self"), local.spec("noise")
            whole = like_whole(spec.tensor_meta, self.device).copy_(gather(local, "self", self))
            slopes = like_whole(noise_spec.tensor_meta, noise.device)
            result = part(local, spec, local.call.op(whole, slopes, lower, upper, True, generator)).clone()
            noise.copy_(part(local, noise_spec, slopes))
        else:
            slopes = uniform(lower, upper).fill(torch.empty_like(self), draw, local.region(local.spec("self")))
            noise.copy_(torch.where(self <= 0, slopes, 1))
            result = self * noise
    return self.copy_(result) if local.call.signature.results[0].written else result


RECTIFY = rule(
    [aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default],
    "..., ... -> ...",
    lowering={("*", "R"): rectify},
)

RULES = (RECTIFY,)
