"""Variance and standard deviation. A sharded dim takes two passes: the global mean, then the distances to it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, Lowering, Op, Rule, rule_from
from shardwise_reduce.dims import accumulator, into, ops, reduced_dims, reduction, split_mesh_dims

__all__ = ["RULES"]


def _moments(local: LocalCall, x: torch.Tensor, correction: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean over the global dims; the reduced dims have size one."""
    dims, mesh_dims = reduced_dims(local.call), local.once(split_mesh_dims)
    count = prod(local.call.args["self"].shape[d] for d in dims)
    # Torch's kernels update a mean that is always finite. A sum is, too, if it is of parts divided by a power of two.
    scale = 1 << count.bit_length()
    total = (x.to(accumulator(x.dtype)) / scale).sum(dims, keepdim=True)
    average = local.comm.all_reduce(total, "sum", mesh_dims) / (count / scale)
    distance = (x - average).abs().square().sum(dims, keepdim=True)
    spread = local.comm.all_reduce(distance, "sum", mesh_dims)
    return spread / max(0, count - (1 if correction is None else correction)), average


def _lowering(finish: Callable[[torch.Tensor], torch.Tensor]) -> Lowering:
    def lowering(
        local: LocalCall,
        x: torch.Tensor,
        dim: Any = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
        **outs: torch.Tensor,
    ) -> Any:
        variance, average = _moments(local, x, correction)
        targets: list[torch.Tensor | None] = [*outs.values()] or [None] * len(local.outputs)
        pairs = zip((finish(variance), average), targets, strict=False)
        results = tuple(into(local, tensor, out, at) for at, (tensor, out) in enumerate(pairs))
        return results if len(results) > 1 else results[0]

    return lowering


def _moment(of: tuple[Op, ...], finish: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    def describe(call: Call) -> Flow:
        """Any dim; a reduced one by two passes over all shards."""
        return reduction(call, "R", lowered=True)

    return rule_from(of, lowering=_lowering(finish))(describe)


VAR = _moment(
    ops("var.correction var.correction_out var_mean.correction var_mean.correction_out"), lambda variance: variance
)
STD = _moment(ops("std.correction std.correction_out std_mean.correction std_mean.correction_out"), torch.sqrt)

RULES = (VAR, STD)
