"""Loss scaling: all gradients are checked and unscaled together, then the scale is updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.rule import LocalCall, rule
from shardwise_optim.positions import overloads

__all__ = ["RULES"]

aten = torch.ops.aten


def check_everywhere(local: LocalCall, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale the shards; ``found_inf`` becomes 1 where any rank finds an infinity or NaN, and else stays as it was."""
    found = torch.zeros_like(found_inf)
    local.call.op(grads, found, inv_scale)
    mesh_dims = sorted({m for spec in local.specs("self") if spec is not None for m in local.sharding(spec)})
    found_inf.masked_fill_(local.comm.all_reduce(found, "max", mesh_dims) != 0, 1.0)


CHECK = rule(
    # Its functional form returns a list and a tensor, which no row of one list position describes; nothing calls it.
    aten._amp_foreach_non_finite_check_and_unscale_.default,
    {"self": "...", "found_inf inv_scale": "R"},
    zip_lists=True,
    lowering=check_everywhere,
    scattered="*",
)

UPDATE = rule(list(overloads("_amp_update_scale")), "R, R, R -> R")

RULES = (CHECK, UPDATE)
