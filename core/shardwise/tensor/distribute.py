"""Make MeshTensors from whole tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import origins
from shardwise.comm.agreement import broadcast_whole
from shardwise.comm.layout_agreement import agree_on_layout
from shardwise.comm.meeting import meet
from shardwise.errors import ArgumentError, LeafError
from shardwise.kernel.arguments import check_mesh, check_tensor
from shardwise.kernel.placements import REPLICATE, Placement, check_placements
from shardwise.kernel.places import Places, per_mesh_dim
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, unexpanded
from shardwise.private_torch.distributed import current_mesh
from shardwise.private_torch.tracing import is_traced
from shardwise.private_torch.transforms import (
    are_transforms_active,
    below_transforms,
    has_tangent,
    is_differentiated_by_torch,
    is_wrapped,
)
from shardwise.tensor.batched import in_batches, is_on_mesh, moved
from shardwise.tensor.local_parts import check_dense, refuse_dtensor
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
    rank's own values without communication; they must be the same. A tensor of another device than the mesh's is
    copied to this rank's device first. Keeps ``requires_grad``; a ``Parameter`` stays a ``Parameter``. Placements
    default to replicated. Raises :class:`PlacementError`, :class:`PlacementCountError`, :class:`LayoutError`,
    :class:`LeafError` or :class:`ArgumentError` before it communicates, and :class:`RankDisagreementError` on every
    rank if the ranks differ.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    check_tensor("distribute a tensor", tensor)
    check_mesh("distribute a tensor", mesh)
    if is_on_mesh(tensor):
        there = cast("MeshTensor", tensor)
        return there if placements is None else there.redistribute(mesh, placements)
    is_derived = is_wrapped(tensor) or has_tangent(tensor) or (tensor.requires_grad and is_differentiated_by_torch())
    if tensor.grad_fn is not None and torch.is_grad_enabled() and not (is_derived or is_traced(tensor)):
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
    check_dense(tensor)
    layout = check_placements(
        [REPLICATE] * mesh.ndim if placements is None else per_mesh_dim(placements, mesh), mesh.ndim, tensor.ndim
    )
    if is_derived:
        whole = _FirstsValues.apply(tensor, mesh, layout, src_data_rank)  # type: ignore[no-untyped-call]
        return MeshTensor.from_local(whole, mesh, [REPLICATE] * mesh.ndim).redistribute(placements=layout)
    with below_transforms():
        return _leaf(tensor, mesh, layout, src_data_rank)


def _leaf(
    tensor: torch.Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...], src_data_rank: int | None
) -> MeshTensor:
    spec = TensorSpec(mesh, layout, unexpanded(TensorMeta.of(tensor)))
    meet(mesh)
    whole, is_sent = _sent(_on_device_of(mesh, tensor.detach()), spec, src_data_rank, tensor.requires_grad)
    sharded = MeshTensor(scatter_local(whole, spec), spec)
    if isinstance(tensor, nn.Parameter):
        sharded = nn.Parameter(sharded, requires_grad=tensor.requires_grad)  # type: ignore[assignment]
    else:
        sharded.requires_grad_(tensor.requires_grad)
    if not is_traced(whole):
        note_placed(sharded._local_tensor)
    if is_sent:
        origins.start(sharded, mesh)  # only where every rank has come: it counts
    return sharded


def _on_device_of(mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on this rank's device, or without data."""
    return tensor if tensor.device.type in (mesh.device_type, "meta") else tensor.to(mesh.device_type)


def _sent(
    whole: torch.Tensor, spec: TensorSpec, src_data_rank: int | None, requires_grad: bool
) -> tuple[torch.Tensor, bool]:
    """The values of one rank, and whether that rank sent them; the ranks compare what they make of them."""
    mesh: Any = spec.mesh
    if mesh.size() > 1 and not is_traced(whole):
        if src_data_rank is not None and whole.device.type != "meta":
            return broadcast_whole(whole, spec, src_data_rank, requires_grad=requires_grad), True
        agree_on_layout(spec, "distribute_tensor")
    return whole, False


class _FirstsValues(torch.autograd.Function):
    """A whole tensor with the values of one rank. Its derivatives are this rank's: they are the same on every rank."""

    @staticmethod
    def forward(tensor: torch.Tensor, mesh: Any, layout: tuple[Placement, ...], src_data_rank: int | None) -> Any:
        spec = TensorSpec(mesh, layout, unexpanded(TensorMeta.of(tensor)))
        meet(mesh)
        return _sent(_on_device_of(mesh, tensor.detach()), spec, src_data_rank, False)[0].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004  # torch's signature
        ctx.how = inputs[1:]
        ctx.device = inputs[0].device
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None if grad is None else grad.to(ctx.device), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_how: None) -> Any:
        if tangent is None:
            return None
        mesh, layout, src_data_rank = ctx.how
        if are_transforms_active():
            return _FirstsValues.apply(tangent, *ctx.how)  # type: ignore[no-untyped-call]
        return in_batches(
            lambda inside, n: _FirstsValues.apply(inside, mesh, moved(layout, 0, n), src_data_rank),  # type: ignore[no-untyped-call]
            tangent,
        )

    @staticmethod
    def vmap(_info: Any, in_dims: Any, tensor: torch.Tensor, mesh: Any, layout: Any, src_data_rank: int | None) -> Any:
        tensor = tensor.movedim(in_dims[0], 0)
        return _FirstsValues.apply(tensor, mesh, moved(layout, 0), src_data_rank), 0  # type: ignore[no-untyped-call]
