"""The style ``sequence_parallel``: a module that works on a part of the sequence."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise import MeshTensor, Shard
from shardwise_transformers.names import generic
from shardwise_transformers.reading import Plan

__all__ = ["shard_sequences"]

SEQUENCE_DIM = 1
"""Activations are [batch, sequence, features]."""


def shard_sequences(model: nn.Module, plan: Plan, mesh_dim: str) -> None:
    """Cut what goes into the modules with this style by its sequence."""
    for name, module in model.named_modules():
        if "sequence_parallel" in (plan.get(name), plan.get(generic(name))):
            module.register_forward_pre_hook(lambda _module, args: (_cut(args[0], mesh_dim), *args[1:]))


def _cut(value: Any, mesh_dim: str) -> Any:
    if not isinstance(value, MeshTensor) or value.ndim <= SEQUENCE_DIM:
        return value
    mesh = value.device_mesh
    placements = list(value.placements)
    placements[(mesh.mesh_dim_names or ()).index(mesh_dim)] = Shard(SEQUENCE_DIM)
    return value.redistribute(placements=placements)
