"""Copies of a MeshTensor, and where a pickle of one may be loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.view_copies import link_deep_copy
from shardwise.errors import LayoutError
from shardwise.kernel.local_strides import dense_in_order, lies_as
from shardwise.kernel.placements import Placement, show_all
from shardwise.kernel.recording import NODE
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.dispatch import new_wrapper
from shardwise.tensor.leaf_grads import HAS_GRAD_HOOK
from shardwise.tensor.memory_access import unmarked

__all__ = ["check_same_place", "deep_copy", "shallow_copy"]


def deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """A copy with memory of its own, as ``copy.deepcopy`` makes it."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("only leaf tensors can be deep-copied, as in torch; detach() first")
    local, spec = _copied(tensor, memo)
    clone: Any = new_wrapper(type(tensor), local, spec, False)
    own = (HAS_GRAD_HOOK, NODE)
    clone.__dict__.update(copy.deepcopy({k: v for k, v in tensor.__dict__.items() if k not in own}, memo))
    memo[id(tensor)] = clone
    if tensor.requires_grad:
        clone.requires_grad_()
    if tensor.grad is not None and not isinstance(tensor, torch.nn.Parameter):  # a parameter's copy starts without
        clone.grad = copy.deepcopy(tensor.grad, memo)
    return clone


def shallow_copy(tensor: Any) -> Any:
    """A tensor over the same memory, as ``copy.copy`` makes it."""
    # It shares memory, so it keeps the mark of a copy that may not be written.
    local = tensor._local_tensor
    twin: Any = new_wrapper(type(tensor), local, tensor._spec, False)
    twin.__dict__.update({k: v for k, v in tensor.__dict__.items() if k != HAS_GRAD_HOOK})
    return twin.requires_grad_() if tensor.requires_grad else twin


def _copied(tensor: Any, memo: dict[int, Any]) -> tuple[torch.Tensor, TensorSpec]:
    """Local tensor and spec of a tensor's deep copy, as torch copies: a parameter becomes dense and alone. Other
    tensors keep their strides, and two that share memory are copied to two that do. So are a copy in place of a view
    and its base.
    """
    local = fresh(tensor._local_tensor)  # first, because a waiting tensor changes its type at its first use
    spec = unmarked(tensor._spec)
    if not isinstance(tensor, torch.nn.Parameter):
        twin = copy.deepcopy(local, memo)
        return twin, tensor._spec if tensor._spec.is_copy and link_deep_copy(local, twin, memo) else spec
    meta = spec.tensor_meta
    dense = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta").clone()
    clone = local.clone()
    spec = spec.with_meta(TensorMeta.of(dense))
    if not lies_as(spec.tensor_meta, clone.shape, clone.stride()):
        clone = dense_in_order(local, spec.tensor_meta)
    return clone, spec


def check_same_place(
    saved_at: tuple[int, ...] | None, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> None:
    """Raise if this rank loads the part of another rank, whose values belong elsewhere in the tensor."""
    if saved_at is None or not dist.is_initialized():
        return
    here = (mesh.mesh == dist.get_rank()).nonzero()
    place = tuple(here[0].tolist()) if len(here) and mesh.size() <= dist.get_world_size() else None
    if place != saved_at:
        where = "is not on that mesh" if place is None else f"has the place {place}"
        raise LayoutError(
            asked=f"load a MeshTensor {tuple(shape)} {show_all(placements)} that the rank at {saved_at} of a mesh "
            f"{tuple(mesh.shape)} has saved by itself",
            found=f"this rank {where}, and such a file holds one rank's part",
            do="Save with shardwise.checkpoint or torch.distributed.checkpoint, or save full_tensor().",
            saved_at=saved_at,
        )
