"""Extremes along one dim, and where they are; over a sharded dim the extremes of all shards are compared."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, Lowering, Op, Rule, dim_of, rule_from, whole
from shardwise_reduce.dims import into, ops, reduction
from shardwise_reduce.extremes import least, most
from shardwise_reduce.line import line_of

__all__ = ["RULES"]


def _extremes(local: LocalCall, x: torch.Tensor, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme value along ``dim`` and its global position; ``dim`` has size one."""
    pick = torch.max if largest else torch.min
    if x.shape[dim]:
        values, positions = pick(x, dim, keepdim=True)
        positions = positions + local.offset(local.spec("self"))[dim]
    else:
        shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
        values = x.new_full(shape, (least if largest else most)(x.dtype))
        positions = torch.zeros(shape, dtype=torch.int64, device=x.device)
    line = line_of(local)
    ones = [1] * len(line.lengths)
    # The shards are in order, and of equal values the first is the result.
    values, shard = pick(torch.cat(line.gather(local, values, ones), dim), dim, keepdim=True)
    return values, torch.cat(line.gather(local, positions, ones), dim).gather(dim, shard)


def _lowering(largest: bool) -> Lowering:
    def lowering(local: LocalCall, x: torch.Tensor, dim: Any = None, keepdim: bool = False, **outs: Any) -> Any:
        values, positions = _extremes(local, x, dim_of(local.call.args["dim"], x.ndim), largest)
        if len(local.outputs) == 1:
            return into(local, positions, outs.get("out"))
        first, second = list(outs.values()) or (None, None)
        return into(local, values, first), into(local, positions, second, 1)

    return lowering


def _position(of: tuple[Op, ...], largest: bool) -> Rule:
    def describe(call: Call) -> Flow:
        """Any dim; over the reduced one the extremes of all shards are compared."""
        return whole(call) if call.args["dim"] is None else reduction(call, "R", lowered=True, in_order=True)

    return rule_from(of, lowering=_lowering(largest))(describe)


MAX = _position(ops("max.dim max.dim_max argmax.default argmax.out"), True)
MIN = _position(ops("min.dim min.dim_min argmin.default argmin.out"), False)

RULES = (MAX, MIN)
