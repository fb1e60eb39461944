"""A rank's part of a tensor: what it must be, the layout that follows from it, and what the ranks compare of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm.agreement import check_agreement
from shardwise.comm.layout_agreement import agree_on_layout
from shardwise.comm.meeting import meet
from shardwise.errors import DeviceMismatchError, LayoutError
from shardwise.kernel.arguments import check_sizes
from shardwise.kernel.local_strides import other_layout
from shardwise.kernel.placements import Placement, shard_dim, show_all
from shardwise.kernel.plurals import counted
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta, unexpanded
from shardwise.private_torch.tracing import (
    is_traced,
)
from shardwise.private_torch.transforms import (
    are_transforms_active,
    below_transforms,
    held,
)

__all__ = ["agree_on_part", "check_dense", "check_device", "refuse_dtensor", "spec_of_part"]


def refuse_dtensor(tensor: Any, asked: str) -> None:
    """Raise :class:`LayoutError` for a DTensor: it has a layout of its own already."""
    if isinstance(tensor, DTensor):
        raise LayoutError(
            asked=asked,
            found=f"it is a DTensor {tuple(tensor.shape)} {show_all(tensor.placements)}",
            do="Take it over with its layout: MeshTensor.from_dtensor(t). "
            "A parameter of a module is replaced: module.weight = nn.Parameter(MeshTensor.from_dtensor(t.detach())).",
        )


def check_dense(tensor: torch.Tensor) -> None:
    """Raise :class:`LayoutError` for a tensor that is sparse, opaque, nested or quantized."""
    if layout := other_layout(tensor):
        raise LayoutError(
            asked="put a tensor" + ("" if tensor.is_nested else f" of shape {tuple(tensor.shape)}") + " on a mesh",
            found=f"its layout is {layout}, and placements say how dense memory is divided",
            do="Distribute a dense tensor (to_dense(), to_padded_tensor(0), dequantize()), or keep this one on each "
            "rank and use it with to_local().",
            layout=layout,
        )


def check_device(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Check that a tensor is dense and is on the device type of its mesh or on the meta device."""
    check_dense(tensor)
    if tensor.device.type in (mesh.device_type, "meta"):
        return
    raise DeviceMismatchError(
        asked=f"put a tensor of shape {tuple(tensor.shape)} on a {mesh.device_type} mesh",
        found=f"it lies on {tensor.device}",
        do=f"Move it first: tensor.to({mesh.device_type!r}).",
        device=str(tensor.device),
        mesh_device=mesh.device_type,
    )


def spec_of_part(
    local: torch.Tensor,
    mesh: Any,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> TensorSpec:
    """The layout of the tensor that has this part on this rank. Without a shape all ranks' parts have the same one.

    Raises :class:`LayoutError` where the part does not fit.
    """
    if shape is not None:
        _check_numbers(local, "shape", shape, tuple(local.shape))
    if stride is not None:
        _check_numbers(local, "stride", stride, local.stride())
    if shape is not None:
        sizes, strides = list(shape), list(TensorMeta.contiguous(shape, local.dtype).stride)
    else:
        # The global sizes and strides if every rank's part has the shape of this local tensor.
        sizes, strides = list(local.shape), list(local.stride())
        for mesh_dim, placement in enumerate(placements):
            if (d := shard_dim(placement)) is not None:
                n = mesh.size(mesh_dim)
                strides = [s * n if i != d and s >= strides[d] else s for i, s in enumerate(strides)]
                sizes[d] *= n
    meta = TensorMeta(torch.Size(sizes), tuple(strides if stride is None else stride), local.dtype)
    if stride is not None:
        meta = unexpanded(meta)
    spec = TensorSpec(mesh, placements, meta)
    if mesh.get_coordinate() is not None and tuple(local.shape) != spec.local_shape():
        found, do = _misfit(tuple(local.shape), spec, is_given=shape is not None)
        raise LayoutError(
            asked=f"take a local tensor of shape {tuple(local.shape)} as this rank's part of {spec}",
            found=f"this rank's part has shape {spec.local_shape()}{found}",
            do=do,
            local_shape=tuple(local.shape),
            expected=spec.local_shape(),
        )
    return spec


def _check_numbers(local: torch.Tensor, name: str, given: Sequence[int], example: tuple[int, ...]) -> None:
    """Raise unless these are numbers from 0 on, one for each dim of a local tensor."""
    asked = f"take a local tensor of shape {tuple(local.shape)} as this rank's part"
    check_sizes(asked, given, name, f"{name}={example}")
    if len(given) != local.ndim:
        raise LayoutError(
            asked=asked,
            found=f"the {name}= {tuple(given)} has {counted(len(given), 'number')}, and the part "
            f"{counted(local.ndim, 'dim')}",
            do=f"Give one number for each dim of the whole tensor, or leave {name}= out.",
        )


def _misfit(local: tuple[int, ...], spec: TensorSpec, *, is_given: bool) -> tuple[str, str]:
    """Why a local tensor is not this rank's part, and what to do."""
    if not is_given:
        return "", "Pass the global shape= (uneven shards need it), or placements that fit."
    whole = tuple(spec.shape)
    if whole == local:
        return (
            ": the shape= that was passed is that of the local tensor itself, and it is to be that of the whole",
            "Pass the shape of the whole tensor, or leave shape= out where the parts of all ranks have one shape.",
        )
    sharded = {shard_dim(placement) for placement in spec.placements}
    expected = spec.local_shape()
    for d in range(len(local)):
        if local[d] != expected[d] and d not in sharded:
            return (
                f": no mesh dim shards dim {d}, and shape= says that the whole tensor has {whole[d]} there",
                f"Correct shape=, or shard dim {d} in the placements.",
            )
    return (
        f": shape= {whole} is divided as torch.chunk does it, the larger parts first",
        "Correct shape= or the placements, or cut the parts in that way; distribute_tensor does it for a whole tensor.",
    )


def agree_on_part(local: torch.Tensor, spec: TensorSpec, call: str, argument: str, run_check: bool = False) -> None:
    """Compare between the ranks what they make of their parts; see :func:`agree_on_layout` for ``argument``."""
    if are_transforms_active():
        with below_transforms():
            agree_on_part(held(local)[0], spec, call, argument, run_check)
        return
    meet(spec.mesh)
    if run_check:  # compares the layout too, also where this rank knows it and another does not
        check_agreement(local, spec)
    elif not is_traced(local):
        agree_on_layout(spec, call, argument)
