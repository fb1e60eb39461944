"""The rule for rectified units whose slope for negative values is drawn in training (``rrelu``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import LocalCall, rule
from shardwise_random.distributions import uniform
from shardwise_random.whole import gathered, like_whole, part

__all__ = ["RULES"]

aten = torch.ops.aten


def rectify(
    local: LocalCall,
    self: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,  # noqa: FBT001, FBT002  # the schema's
    generator: torch.Generator | None = None,
) -> Any:
    """The units with this rank's part of the slopes, which go into ``noise``: 1 where a value is positive."""
    in_place = local.call.signature.results[0].written
    if training and not self.is_meta:
        slopes = _slopes(local, self, noise, float(lower), float(upper), generator)
        noise.copy_(torch.where(self > 0, 1, slopes))
        found = self * noise
    else:
        found = torch.where(self > 0, self, self * ((lower + upper) / 2))
    return self.copy_(found) if in_place else found


def _slopes(
    local: LocalCall, self: Tensor, noise: Tensor, lower: float, upper: float, generator: torch.Generator | None
) -> Tensor:
    spec = local.spec("self")
    draw = local.draw() if generator is None else None
    if draw is not None:
        return uniform(lower, upper).fill(torch.empty_like(self), draw, local.region(spec))
    # torch draws for negative values only, so the draws depend on all of them.
    whole = gathered(local, "self", self)
    slopes = like_whole(local.spec("noise").tensor_meta, noise.device)
    aten.rrelu_with_noise.default(whole, slopes, lower, upper, True, generator)  # noqa: FBT003
    return part(local, spec, slopes)


RECTIFY = rule(
    [aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default],
    "..., ... -> ...",
    lowering=rectify,
    lowered="*",
)

RULES = (RECTIFY,)
