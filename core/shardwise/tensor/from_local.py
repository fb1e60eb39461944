"""A MeshTensor of this rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.kernel.arguments import check_flag, check_mesh, check_tensor
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.placements import REPLICATE, Placement, check_placements, show_all
from shardwise.kernel.places import Places, per_mesh_dim
from shardwise.private_torch.distributed import current_mesh
from shardwise.private_torch.transforms import are_transforms_active
from shardwise.tensor.autograd import join
from shardwise.tensor.grad_layouts import checked_grad_layout
from shardwise.tensor.local_parts import agree_on_part, check_device, refuse_dtensor, spec_of_part
from shardwise.tensor.placed import note_placed
from shardwise.tensor.traceable import traceable

__all__ = ["from_local"]


@traceable
def from_local(
    local: torch.Tensor,
    mesh: Any,
    placements: Places | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> Any:
    """A MeshTensor from this rank's part; see :meth:`MeshTensor.from_local`."""
    mesh = current_mesh() if mesh is None else mesh
    asked = "take a tensor as this rank's part"
    check_tensor(asked, local, "local_tensor")
    check_mesh(asked, mesh)
    refuse_dtensor(local, asked)
    if isinstance(local, tensor_class()):
        raise LayoutError(
            asked=asked,
            found=f"it is a MeshTensor {tuple(local.shape)} {show_all(local._spec.placements)} already",
            do="Use it as it is, redistribute it, or give its part: to_local().",
        )
    check_flag(asked, run_check, "run_check")
    check_device(local, mesh)
    layout = (REPLICATE,) * mesh.ndim if placements is None else per_mesh_dim(placements, mesh)
    spec = spec_of_part(local, mesh, check_placements(layout, mesh.ndim, local.ndim), shape, stride)
    agree_on_part(local, spec, "from_local", "shape" if shape is None else "", run_check)
    if placements is not None and spec.is_replicated and type(local) is torch.Tensor and not are_transforms_active():
        note_placed(local)
    return join(local, spec, checked_grad_layout(grad_placements, spec))
