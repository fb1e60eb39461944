"""Rules for the fused ops of dropout. On the CPU torch composes dropout of an in-place Bernoulli draw instead."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.rule import Call, Flow, LocalCall, einop, iterated, rule, rule_from
from shardwise_random.distributions import bernoulli
from shardwise_random.whole import like_whole, part

__all__ = ["RULES"]

aten = torch.ops.aten


def drop(
    local: LocalCall,
    input: torch.Tensor,  # noqa: A002  # the schema's name
    p: float,
    train: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply this rank's part of the mask, the same values that the in-place Bernoulli draw gives."""
    mask = torch.ones_like(input, dtype=torch.bool)
    if train is False:
        return input.clone(), mask
    spec = local.spec("input")
    draw = None if local.without_data(input) else local.draw()
    if draw is not None:
        bernoulli(1 - p).fill(mask, draw, local.region(spec))
    elif not local.without_data(input):
        _, whole = local.call.op(like_whole(spec.tensor_meta, input.device).fill_(1), p, train)
        mask = part(local, spec, whole).clone()
    return input.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


DROPOUT = rule(aten.native_dropout.default, "... -> ..., ...", lowering={("*", "R"): drop})


@rule_from(aten.native_dropout_backward.default, results=iterated)
def BACKWARD() -> Callable[[Call], Flow]:
    """..., ... -> ...: linear in the gradient."""
    return einop("..., ... -> ...", linear="grad_output")


RULES = (DROPOUT, BACKWARD)
