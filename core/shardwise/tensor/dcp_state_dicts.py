"""The options of ``torch.distributed.checkpoint.state_dict`` on MeshTensors: gather state dicts, and load them.

Torch gathers and distributes only tensors of classes that it knows by name. Here its three functions for this get
MeshTensors as whole tensors, and the whole tensors that they return are sharded again. So ``full_state_dict``,
``cpu_offload`` and ``broadcast_from_rank0`` mean the same as on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from shardwise.kernel.results import wrap
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.distributed import wrap_state_dict_functions
from shardwise.tensor.distribute import distribute_tensor
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["install"]


def install() -> None:
    """Make torch's functions on state dicts accept MeshTensors."""
    wrap_state_dict_functions(
        {
            "gather": _gathering,
            # From the first rank, because torch gives every rank the first rank's values here.
            "distribute": partial(_spreading, source=0),
            "broadcast": _spreading,
            "offload": _offloading,
        }
    )


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(gather)
    def gather_whole(state_dict: dict[str, Any], **options: Any) -> Any:
        wanted = options.get("ranks_only") or ()
        keeps = not wanted or dist.get_rank(options.get("pg")) in wanted
        with torch.no_grad():
            # One tensor after the other: a rank that keeps none never holds more than one whole tensor.
            return gather(_whole(state_dict, keeps, bool(options.get("cpu_offload"))), **options)

    return gather_whole


def _whole(value: Any, keeps: bool, offloaded: bool) -> Any:
    if isinstance(value, MeshTensor):
        full = value.full_tensor()
        if not keeps:
            return None
        return full.cpu() if offloaded else full
    if isinstance(value, dict):
        return {key: _whole(inner, keeps, offloaded) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(inner, keeps, offloaded) for inner in value)
    return value


def _offloading(offload: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(offload)
    def offload_parts(state_dict: dict[str, Any], **options: Any) -> Any:
        with torch.no_grad():
            return offload(_on_host(state_dict), **options)

    return offload_parts


def _on_host(value: Any) -> Any:
    """A state with each part in the memory of the host, on the same mesh: only copying and saving can use it."""
    if isinstance(value, MeshTensor):
        local = fresh(value._local_tensor)
        return (
            value if local.device.type == "cpu" else wrap(local.cpu(), value._spec.with_meta(value._spec.tensor_meta))
        )
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_host, value))
    return value


def _spreading(spread: Callable[..., Any], source: int | None = None) -> Callable[..., Any]:
    @wraps(spread)
    def spread_parts(full: dict[str, Any], local: dict[str, Any], *args: Any, **options: Any) -> None:
        before = {key: value for key, value in local.items() if isinstance(value, MeshTensor)}
        spread(full, local, *args, **options)
        _cut_again(local, before, source)

    return spread_parts


def _cut_again(local: dict[str, Any], before: Mapping[str, MeshTensor], source: int | None) -> None:
    """Shard whole tensors as they were before. A wrong shape is left for ``load_state_dict`` to report."""
    for key, old in before.items():
        new = local.get(key)
        if isinstance(new, torch.Tensor) and not isinstance(new, MeshTensor) and new.shape == old.shape:
            mesh = old.device_mesh
            whole = new.detach().to(mesh.device_type)
            local[key] = distribute_tensor(whole, mesh, old.placements, src_data_rank=source)
