"""The groups of a mesh: the ranks along its mesh dims. Each group is made once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.call_comparison import compare_if_asked
from shardwise.comm.collective_log import call_code
from shardwise.comm.graph_calls import follow_graphs, forget_graphs
from shardwise.comm.group import Group
from shardwise.comm.rank_failures import go_on, watch
from shardwise.comm.silent_group import SilentGroup
from shardwise.comm.waiting_ranks import explained
from shardwise.kernel.mesh import first_equal, own_coordinate
from shardwise.kernel.reductions import as_sendable
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.distributed import new_local_group
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes

__all__ = [
    "all_reduce",
    "backend_of",
    "broadcast_",
    "carrying_device",
    "forget",
    "group_of",
    "process_group_of",
]

_groups: dict[tuple[DeviceMesh, tuple[int, ...]], Group] = {}
# How many process groups of some ranks were made here; the same on all of these ranks.
_made: Counter[tuple[int, ...]] = Counter()


def forget() -> bool:
    """Drop all process groups. Returns whether any of them had threads of gloo."""
    by_gloo = any(group.is_gloo for group in _groups.values())
    _groups.clear()
    forget_graphs()
    return by_gloo


def _forget_world() -> None:
    _groups.clear()
    forget_graphs()
    _made.clear()


_per_world = PerWorld(_groups, _forget_world)


def process_group_of(mesh: DeviceMesh, mesh_dim: int) -> Any:
    """The process group of this rank along a mesh dim, the same for all equal meshes."""
    return first_equal(mesh).get_group(mesh_dim)


def group_of(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Group:
    """The group of this rank over some mesh dims. Its ranks are in row-major order of ``mesh_dims``, in their order.

    The first call over several mesh dims may make a process group: all ranks of the group must make the same calls.
    """
    groups = _per_world.now()
    dims = tuple(mesh_dims)
    known = groups.get((mesh, dims))
    if known is None:
        with outside_modes():  # the mesh's ranks are real while a graph is traced
            known = groups[mesh, dims] = _make_group(mesh, dims)
    return known


def _make_group(mesh: DeviceMesh, dims: tuple[int, ...]) -> Group:
    coordinate = own_coordinate(mesh)
    others = [m for m in range(mesh.ndim) if m not in dims]
    # The group's mesh dims in front, one column per coordinate on the others.
    columns = mesh.mesh.permute(*dims, *others).reshape(*(mesh.size(m) for m in dims), -1)
    column = 0
    for m in others:
        column = column * mesh.size(m) + coordinate[m]
    ranks = columns[..., column].flatten().tolist()
    position = ranks.index(dist.get_rank())
    if len(ranks) == 1:
        return Group(None, 1, 0, dims, "", None)
    if is_rehearsing():
        return SilentGroup(len(ranks), position, dims)
    several = [m for m in dims if mesh.size(m) > 1]
    process_group: Any
    if len(several) == 1:
        process_group = process_group_of(mesh, several[0])
    elif sorted(ranks) == list(range(dist.get_world_size())):
        process_group = dist.group.WORLD
    else:
        members = tuple(sorted(ranks))
        _made[members] += 1
        process_group = new_local_group(members, f"shardwise/{'-'.join(map(str, members))}/{_made[members]}")
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config(process_group)).split(","))
    # A process group counts its ranks in ascending order, whatever their order on the mesh.
    order = None if ranks == sorted(ranks) else tuple(ranks.index(rank) for rank in sorted(ranks))
    group = Group(process_group, len(ranks), position, dims, backends.get(mesh.device_type, ""), order)
    watch(process_group, group)
    follow_graphs(process_group, group, mesh)
    compare_if_asked()
    return group


def broadcast_(tensor: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], index: int = 0) -> Tensor:
    """Overwrite a contiguous tensor, on all ranks along some mesh dims, with that of the rank at ``index`` on each."""
    dims = tuple(m for m in mesh_dims if mesh.size(m) > 1)
    if dims and not is_rehearsing():
        sendable = as_sendable(tensor.view(-1))
        group = group_of(mesh, dims)
        go_on()
        group.log.record(call_code("broadcast", dims), sendable.nbytes)
        with explained(group.process_group):
            position = index * sum(math.prod(mesh.size(m) for m in dims[i + 1 :]) for i in range(len(dims)))
            dist.broadcast(sendable, group=group.process_group, group_src=group.rank_at(position))
    return tensor


def all_reduce(tensor: Tensor, kind: str, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
    """The reduction of ``tensor`` (any strides) over some mesh dims, in new memory."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    group = group_of(mesh, mesh_dims)
    return copy if group.size == 1 or copy.numel() == 0 else group.of(copy).all_reduce_(copy, kind)


def backend_of(mesh: DeviceMesh) -> str:
    """The backend of the mesh's collectives, which is the same on all its ranks."""
    config = str(dist.get_backend_config(process_group_of(mesh, 0)))
    return dict(pair.split(":") for pair in config.split(",")).get(mesh.device_type, config)


def carrying_device(mesh: DeviceMesh) -> str:
    """The type of the devices whose tensors the mesh's process groups can send."""
    return "cpu" if backend_of(mesh) == "gloo" else mesh.device_type
