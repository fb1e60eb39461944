"""Largest and smallest values along one dim, and where they are; over a sharded dim the shards' winners compete."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.lowering import Lowering
from shardwise.rule import Call, Flow, LocalCall, Rule, rule_from
from shardwise.signature import Op
from shardwise_reduce.dims import into, ops, reduction, splitting
from shardwise_reduce.extremes import least, most

__all__ = ["RULES"]


def _winners(local: LocalCall, x: torch.Tensor, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The winning value along ``dim`` and its global position, the dim kept."""
    pick = torch.max if largest else torch.min
    if x.shape[dim]:
        values, positions = pick(x, dim, keepdim=True)
        positions = positions + local.offset(local.spec("self"))[dim]
    else:
        shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
        values = x.new_full(shape, (least if largest else most)(x.dtype))
        positions = torch.zeros(shape, dtype=torch.int64, device=x.device)
    # The last mesh dim splits innermost. Joined from there, shards stand in their order and the first of equals wins.
    for mesh_dim in reversed(local.once(splitting)):
        rivals = torch.cat(local.comm.all_gather(values, mesh_dim, alike=True), dim)
        places = torch.cat(local.comm.all_gather(positions, mesh_dim, alike=True), dim)
        values, winner = pick(rivals, dim, keepdim=True)
        positions = places.gather(dim, winner)
    return values, positions


def _dim(local: LocalCall) -> int:
    ndim: int = local.call.args["self"].ndim
    return int(local.call.args["dim"]) % max(1, ndim)


def _lowering(largest: bool) -> Lowering:
    def lowering(local: LocalCall, x: torch.Tensor, dim: Any = None, keepdim: bool = False, **outs: Any) -> Any:
        values, positions = _winners(local, x, _dim(local), largest)
        if len(local.outputs) == 1:
            return into(local, positions, outs.get("out"))
        first, second = list(outs.values()) or (None, None)
        return into(local, values, first), into(local, positions, second, 1)

    return lowering


def _position(of: tuple[Op, ...], largest: bool) -> Rule:
    def describe(call: Call) -> Flow:
        """Any dim; over the reduced one the shards' winners are compared."""
        if call.args["dim"] is None:
            return Flow([None], [None])
        return reduction(call, "R", lowered=True)

    return rule_from(of, lowering=_lowering(largest))(describe)


MAX = _position(ops("max.dim max.dim_max argmax.default argmax.out"), True)
MIN = _position(ops("min.dim min.dim_min argmin.default argmin.out"), False)

RULES = (MAX, MIN)
