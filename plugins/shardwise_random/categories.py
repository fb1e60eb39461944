"""The rules for samples from categories, and for random orders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Draw, Flow, LocalCall, Region, TensorMeta, like, rule_from
from shardwise_random.whole import gather, part, rehearse

__all__ = ["RULES"]

aten = torch.ops.aten


def _sample(
    local: LocalCall,
    self: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The rows of a sample that this rank holds."""
    (result,) = local.outputs
    assert result is not None
    if local.without_data(self):
        rehearse(local, self=self)
        return self.new_empty(local.local_shape(result), dtype=torch.int64)
    draw = local.draw() if generator is None else None
    if draw is None:
        whole = gather(local, "self", self)
        return part(local, result, local.call.op(whole, num_samples, replacement, generator=generator)).clone()
    _check(local, self, num_samples, replacement=replacement)
    if not self.numel() or not num_samples:
        return self.new_zeros(local.local_shape(result), dtype=torch.int64)
    if not draw.by_place:
        own = draw.generator(self.device, local.offset(result))
        sample: Tensor = local.call.op(self, num_samples, replacement, generator=own)
        return sample
    if replacement:
        return _by_inversion(draw, self, local.region(result))
    return _by_race(draw, self, num_samples, local.region(local.spec("self")))


def _by_race(draw: Draw, weights: Tensor, count: int, region: Region) -> Tensor:
    """The categories that come first in a race: each has an exponential time, with its weight as the rate."""
    times = draw.positive(region, torch.float64, weights.device).log_().neg_().div_(weights.double())
    return times.topk(count, -1, largest=False).indices


def _by_inversion(draw: Draw, weights: Tensor, region: Region) -> Tensor:
    """Where uniform values fall among the cumulative weights; a category without weight is never drawn."""
    sums = weights.double().cumsum(-1)
    total = sums[..., -1:]
    values = draw.uniform(region, torch.float64, weights.device) * total
    last = (weights > 0).double().cumsum(-1).argmax(-1, keepdim=True)
    # A product may round up to the total, behind the last category that has weight.
    return torch.searchsorted(sums.contiguous(), values.contiguous(), right=True).minimum(last)


def _check(local: LocalCall, weights: Tensor, count: int, *, replacement: bool) -> None:
    """Refuse wrong weights as torch does; if they are wrong on one rank, every rank raises."""
    positive = weights > 0
    enough = positive.any(-1) if replacement else positive.sum(-1) >= count
    are_valid = bool((weights >= 0).all() & weights.isfinite().all() & enough.all())
    sharding = local.sharding(local.spec("self"))
    if sharding:
        flag = torch.tensor([int(not are_valid)], device=weights.device)
        are_valid = not bool(local.comm.all_reduce(flag, "max", sharding))
    if not are_valid:
        needed = "one positive weight" if replacement else f"{count} positive weights"
        raise RuntimeError(
            f"invalid multinomial distribution: weights must be finite and not negative, with at least {needed} in "
            "each row"
        )


@rule_from(aten.multinomial.default, lowering=_sample)
def MULTINOMIAL(self: TensorMeta) -> Flow:
    """Rows may be sharded; the categories are whole."""
    return like(self, whole={-1}, lowered=("*", "R"))


# -- random orders ---------------------------------------------------------------------------------------------------


def _permute(local: LocalCall, n: int, *, generator: torch.Generator | None = None, out: Tensor) -> Any:
    """The whole order, of which this rank keeps its part."""
    (result,) = local.outputs
    assert result is not None
    draw = local.draw() if generator is None and not local.without_data(out) else None
    if draw is not None:
        return out.copy_(part(local, result, draw.permutation(n, out.device)))
    whole = torch.randperm(n, dtype=out.dtype, device=out.device, generator=generator)
    return out.copy_(part(local, result, whole))


@rule_from(aten.randperm.generator_out, lowering=_permute)
def PERMUTATION() -> Flow:
    """The order may be sharded: every rank computes all of it."""
    return Flow([], [("n",)], lowered=("*", "R"))


RULES = (MULTINOMIAL, PERMUTATION)
