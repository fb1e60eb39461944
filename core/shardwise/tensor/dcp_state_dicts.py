"""The options of ``torch.distributed.checkpoint.state_dict`` on MeshTensors: whole state dicts out, and in again.

Torch gathers and spreads tensors of the classes that it knows by name. Its three functions for that are given
MeshTensors as whole tensors, and what they leave whole is cut again; so ``full_state_dict``, ``cpu_offload`` and
``broadcast_from_rank0`` mean what they mean on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from shardwise.private_torch.distributed import wrap_state_dict_functions
from shardwise.tensor.distribute import distribute_tensor
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["install"]


def install() -> None:
    """Let torch's functions on state dicts take MeshTensors."""
    wrap_state_dict_functions(
        {
            "_gather_state_dict": _gathering,
            # From the first rank, as torch gives every rank that one's values there.
            "_distribute_state_dict": partial(_spreading, source=0),
            "_broadcast_state_dict": _spreading,
        }
    )


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(gather)
    def gather_whole(state_dict: dict[str, Any], **options: Any) -> Any:
        wanted = options.get("ranks_only") or ()
        kept = not wanted or dist.get_rank(options.get("pg")) in wanted
        with torch.no_grad():
            # One tensor after the other, so that a rank that keeps none never has more than one.
            return gather(_whole(state_dict, kept, bool(options.get("cpu_offload"))), **options)

    return gather_whole


def _whole(value: Any, kept: bool, offloaded: bool) -> Any:
    if isinstance(value, MeshTensor):
        full = value.full_tensor()
        if not kept:
            return None
        return full.cpu() if offloaded else full
    if isinstance(value, dict):
        return {key: _whole(inner, kept, offloaded) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(inner, kept, offloaded) for inner in value)
    return value


def _spreading(spread: Callable[..., Any], source: int | None = None) -> Callable[..., Any]:
    @wraps(spread)
    def spread_parts(full: dict[str, Any], local: dict[str, Any], *args: Any, **options: Any) -> None:
        before = {key: value for key, value in local.items() if isinstance(value, MeshTensor)}
        spread(full, local, *args, **options)
        _cut_again(local, before, source)

    return spread_parts


def _cut_again(local: dict[str, Any], before: Mapping[str, MeshTensor], source: int | None) -> None:
    """Lay what came whole as it lay before. A wrong shape is left, for ``load_state_dict`` to say so."""
    for key, was in before.items():
        came = local.get(key)
        if isinstance(came, torch.Tensor) and not isinstance(came, MeshTensor) and came.shape == was.shape:
            mesh = was.device_mesh
            whole = came.detach().to(mesh.device_type)
            local[key] = distribute_tensor(whole, mesh, was.placements, src_data_rank=source)
