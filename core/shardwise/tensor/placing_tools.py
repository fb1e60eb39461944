"""Torch's tools that place or send tensors themselves, on modules and tensors that are on a mesh already.

A MeshTensor is whole to them, so they would shard shards, or send what is not there. Each is refused before it changes
anything; what does its work here is in the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import GatheredWholeWarning, TorchToolError, warn_user
from shardwise.kernel.known_tensors import is_written_by_ops
from shardwise.kernel.registry import refused_collective
from shardwise.private_torch.placing_tools import check_collectives, check_placing_tools

__all__ = ["refuse_placing_tools"]

_SHARDING = (
    "Leave {tool} out, and shard the parameters by placements: sw.distribute_module(model, mesh, "
    '{{"*": {{"dp": Shard(0)}}}}), then sw.prefetch(model, "dp"); see docs/cookbook/from-fsdp2.md.'
)
_AS_DTENSOR = (
    "x.redistribute(placements=...) moves it, x.to_dtensor() makes a DTensor of it, and the placements of modules are "
    "patterns of sw.distribute_module; torch's parallel styles are in shardwise_dtensor.parallel."
)
_DO = {
    "fully_shard": _SHARDING,
    "FullyShardedDataParallel": _SHARDING,
    "DistributedDataParallel": "Leave {tool} out: with the batch placed, sw.distribute_tensor(batch, mesh, "
    "[Shard(0)]), gradients are summed over the mesh by themselves; see docs/cookbook/data-parallel.md. A training "
    "loop of another package that does it by itself finds WORLD_SIZE in the environment: see "
    "docs/cookbook/training-loops.md.",
    "ZeroRedundancyOptimizer": "Use the optimizer itself: its states lie as the parameters do. Where these are "
    "sharded, sw.distribute_module(model, mesh, {{'*': {{'dp': Shard(0)}}}}), each rank has a share of the states.",
    "PipelineStage": "Place each stage on a mesh of its own ranks, such as a mesh without the dim of the stages "
    '(mesh["tp"] of a mesh with the dims "pp" and "tp").',
}


def refuse_placing_tools(cls: type) -> None:
    """Have torch's tools that place or send tensors raise for MeshTensors, before they start."""

    def check(tool: str, value: Any, arguments: dict[str, Any]) -> Any:
        if isinstance(value, Iterator):
            value = list(value)
        for name, tensor in _tensors(value):
            if isinstance(tensor, cls) and not (tool == "PipelineStage" and _is_within(tensor, arguments)):
                _refuse(tool, name, tensor)
        return value

    def refuse(name: str) -> NoReturn:
        raise refused_collective(f"torch.distributed.{name}")

    check_placing_tools(check)
    check_collectives(cls, refuse, _warn_of_copies)


def _warn_of_copies(name: str, given: Any) -> None:
    """Warn where what this rank gives to others was made from MeshTensors: each of them has the same.

    Metrics do this that count on every rank and add up over the ranks.
    """
    for tensor in _tensors(given):
        if is_written_by_ops(tensor[1]):
            warn_user(
                f"torch.distributed.{name} of a plain tensor {tuple(tensor[1].shape)} to which MeshTensors were added: "
                "each rank has the whole value, so a sum over the ranks counts it once per rank. Leave the collective "
                "out, as sync_on_compute=False does in torchmetrics; see docs/cookbook/training-loops.md.",
                GatheredWholeWarning,
            )


def _refuse(tool: str, name: str, tensor: Any) -> NoReturn:
    what = f"its parameter or buffer {name!r}" if name else "it"
    raise TorchToolError(
        asked=f"use {tool} of torch" if not tool.startswith("torch.") else f"call {tool}",
        found=f"{what} is on a mesh already: {tensor._spec}",
        do=_DO.get(tool, _AS_DTENSOR).format(tool=tool),
        tool=tool,
        name=name,
    )


def _tensors(value: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a module, of modules, of parameters or of their groups, with the names that they have."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, dict):
        yield from _tensors(value.get("params"))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _is_within(tensor: Any, arguments: dict[str, Any]) -> bool:
    """Whether the mesh of a stage's tensor has one rank of the pipeline, or none."""
    ranks = dist.get_process_group_ranks(arguments.get("group") or dist.group.WORLD)
    shared = {*tensor.device_mesh.mesh.flatten().tolist()}.intersection(ranks)
    return len(shared) <= 1
