"""The groups of a mesh: which ranks lie along its mesh dims, made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import Group
from shardwise.comm.silent_group import SilentGroup
from shardwise.kernel.reductions import as_sendable
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.tracing import outside_modes

__all__ = ["all_reduce", "backend_of", "broadcast_", "carrying_device", "forget", "group_of", "rank_at"]

_groups: dict[tuple[DeviceMesh, tuple[int, ...]], Group] = {}


def forget() -> bool:
    """Let go of all process groups; whether any of them had threads of gloo."""
    by_gloo = any(group.is_gloo for group in _groups.values())
    _groups.clear()
    return by_gloo


_per_world = PerWorld(_groups, _groups.clear)


def group_of(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Group:
    """The group of this rank over some mesh dims, its ranks in row-major order of these dims as given.

    Made once. Over several mesh dims the first call makes a process group: all ranks of the group must make it alike.
    """
    groups = _per_world.now()
    dims = tuple(mesh_dims)
    known = groups.get((mesh, dims))
    if known is None:
        with outside_modes():  # the mesh's ranks are real while a graph is traced
            known = groups[mesh, dims] = _make_group(mesh, dims)
    return known


def _make_group(mesh: DeviceMesh, dims: tuple[int, ...]) -> Group:
    where = mesh.get_coordinate()
    if where is None:
        raise ValueError("this rank is not part of the mesh")
    others = [m for m in range(mesh.ndim) if m not in dims]
    # mesh_dims in front, this rank's coordinate on all others: the ranks of the group, row-major.
    along = mesh.mesh.permute(*dims, *others).reshape(*(mesh.size(m) for m in dims), -1)
    column = 0
    for m in others:
        column = column * mesh.size(m) + where[m]
    ranks = along[..., column].flatten().tolist()
    position = ranks.index(dist.get_rank())
    if len(ranks) == 1:
        return Group(None, 1, 0, dims, "", None)
    if is_rehearsing():
        return SilentGroup(len(ranks), position, dims)
    process_group = _process_group(mesh, dims, ranks)
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config(process_group)).split(","))
    # Process groups count their ranks in ascending order, whatever order a mesh has them in.
    order = None if ranks == sorted(ranks) else tuple(ranks.index(rank) for rank in sorted(ranks))
    return Group(process_group, len(ranks), position, dims, backends.get(mesh.device_type, ""), order)


def _process_group(mesh: DeviceMesh, dims: tuple[int, ...], ranks: list[int]) -> Any:
    real = [m for m in dims if mesh.size(m) > 1]
    if len(real) == 1:
        return mesh.get_group(real[0])
    if sorted(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(sorted(ranks), use_local_synchronization=True)


def rank_at(mesh: DeviceMesh, mesh_dim: int, index: int) -> int:
    """The global rank at ``index`` along a mesh dim, at this rank's coordinate on all others.

    A process group counts its ranks in ascending order, so an index on a mesh dim is no rank of its group.
    """
    where = mesh.get_coordinate()
    if where is None:
        raise ValueError("this rank is not part of the mesh")
    return int(mesh.mesh[(*where[:mesh_dim], index, *where[mesh_dim + 1 :])])


def broadcast_(tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, index: int = 0) -> Tensor:
    """Overwrite a contiguous tensor on all ranks along a mesh dim by that of the rank at ``index``."""
    if mesh.size(mesh_dim) > 1 and not is_rehearsing():
        sendable = as_sendable(tensor.view(-1))
        dist.broadcast(sendable, src=rank_at(mesh, mesh_dim, index), group=mesh.get_group(mesh_dim))
    return tensor


def all_reduce(tensor: Tensor, kind: str, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
    """The reduction of ``tensor`` (any strides) over some mesh dims, in new memory; ``tensor`` is left as it is."""
    own = tensor.clone(memory_format=torch.contiguous_format)
    group = group_of(mesh, mesh_dims)
    return own if group.size == 1 or own.numel() == 0 else group.all_reduce_(own, kind)


def backend_of(mesh: DeviceMesh) -> str:
    """What carries the mesh's collectives; the same on all ranks, which made the process groups together."""
    config = str(dist.get_backend_config(mesh.get_group(0)))
    return dict(pair.split(":") for pair in config.split(",")).get(mesh.device_type, config)


def carrying_device(mesh: DeviceMesh) -> str:
    """The device whose tensors the mesh's process groups carry."""
    return "cpu" if backend_of(mesh) == "gloo" else mesh.device_type
