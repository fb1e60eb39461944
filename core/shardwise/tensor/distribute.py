"""Make MeshTensors from whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import origins
from shardwise.comm.agreement import broadcast_whole
from shardwise.comm.layout_agreement import agree_on_layout
from shardwise.comm.meeting import meet
from shardwise.errors import ArgumentError, LeafError
from shardwise.kernel.arguments import check_mesh, check_tensor
from shardwise.kernel.placements import REPLICATE, check_placements
from shardwise.kernel.places import Places, per_mesh_dim
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, unexpanded
from shardwise.private_torch.distributed import current_mesh
from shardwise.private_torch.tracing import is_traced
from shardwise.tensor.autograd import check_device, refuse_dtensor
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.placed import note_placed
from shardwise.tensor.shards import scatter_local
from shardwise.tensor.traceable import traceable

__all__ = ["distribute_tensor"]


@traceable
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Places | None = None,
    *,
    src_data_rank: int | None = 0,
) -> MeshTensor:
    """A leaf MeshTensor from a whole tensor. Every rank must call this, with the same shape, dtype and placements.

    ``placements`` are one per mesh dim; or a mapping from mesh dim names, with the other dims replicated; or one alone
    on a mesh with one dim.

    The values are those of the mesh's first rank, which sends them to the others. ``src_data_rank=None`` uses each
    rank's own values without communication; they must be the same. Keeps ``requires_grad``; a ``Parameter`` stays a
    ``Parameter``. Placements default to replicated. Raises :class:`PlacementError`, :class:`PlacementCountError`,
    :class:`DeviceMismatchError`, :class:`LeafError` or :class:`ArgumentError` before it communicates, and
    :class:`RankDisagreementError` on every rank if the ranks differ.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    check_tensor("distribute a tensor", tensor)
    check_mesh("distribute a tensor", mesh)
    if isinstance(tensor, MeshTensor):
        return tensor if placements is None else tensor.redistribute(mesh, placements)
    if tensor.grad_fn is not None and torch.is_grad_enabled() and not is_traced(tensor):
        raise LeafError(
            asked=f"distribute a tensor of shape {tuple(tensor.shape)}",
            found=f"only a leaf can be distributed, and this is the result of an op ({tensor.grad_fn.name()})",
            do="Use distribute_tensor to distribute leaf tensors, such as its detach(). For a gradient of that op take "
            "MeshTensor.from_local(t, mesh, [Replicate()] * mesh.ndim).redistribute(placements=placements).",
        )
    source: Any = src_data_rank
    if source is not None and not (type(source) is int and 0 <= source < min(mesh.shape)):
        raise ArgumentError(
            asked="distribute a tensor",
            found=f"its argument 'src_data_rank' is {src_data_rank!r}",
            do=f"Give the coordinate that the source has on each mesh dim, from 0 to {min(mesh.shape) - 1}, or None.",
            argument="src_data_rank",
        )
    refuse_dtensor(tensor, "distribute a tensor")
    check_device(tensor, mesh)
    layout = [REPLICATE] * mesh.ndim if placements is None else per_mesh_dim(placements, mesh)
    spec = TensorSpec(mesh, check_placements(layout, mesh.ndim, tensor.ndim), unexpanded(TensorMeta.of(tensor)))
    meet(mesh)
    whole = tensor.detach()
    is_sent = False
    if mesh.size() > 1 and not is_traced(whole):
        if src_data_rank is not None and whole.device.type != "meta":
            whole = broadcast_whole(whole, spec, src_data_rank, requires_grad=tensor.requires_grad)
            is_sent = True
        else:
            agree_on_layout(spec, "distribute_tensor")
    sharded = MeshTensor(scatter_local(whole, spec), spec)
    if isinstance(tensor, nn.Parameter):
        sharded = nn.Parameter(sharded, requires_grad=tensor.requires_grad)  # type: ignore[assignment]
    else:
        sharded.requires_grad_(tensor.requires_grad)
    if not is_traced(whole):
        note_placed(sharded)
    if is_sent:
        origins.start(sharded, mesh)  # only where every rank has come: it counts
    return sharded
