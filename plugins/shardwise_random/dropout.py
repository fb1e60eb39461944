"""Rules for dropout. On the CPU torch writes it with an in-place Bernoulli draw; these are the fused forms."""

from __future__ import annotations

import torch

from shardwise.rule import LocalCall, rule
from shardwise_random.whole import like_whole, part

__all__ = ["RULES"]

aten = torch.ops.aten


def drop(
    local: LocalCall,
    input: torch.Tensor,  # noqa: A002  # the schema's name
    p: float,
    train: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the whole mask as one device would and apply this rank's part of it."""
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    spec = local.spec("input")
    _, whole = local.call.op(like_whole(spec.tensor_meta, input.device).fill_(1), p, train)
    mask = part(local, spec, whole).clone()
    return input.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


DROPOUT = rule(aten.native_dropout.default, "... -> ..., ...", lowering=drop, lowered="*")

BACKWARD = rule(
    aten.native_dropout_backward.default,
    "..., ... -> ...",
    partial=["sum, R -> sum", "avg, R -> avg"],
)

RULES = (DROPOUT, BACKWARD)
