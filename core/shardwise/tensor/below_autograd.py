"""What happens to memory at the borders of a MeshTensor. Derivatives are :mod:`shardwise.tensor.autograd`'s concern."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm import origins
from shardwise.comm.run_step import StepRunner
from shardwise.engine.view_copies import link_view
from shardwise.kernel.kept_moves import leave_out
from shardwise.kernel.local_strides import alias, in_order
from shardwise.kernel.recording import recording
from shardwise.kernel.results import wrap
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.dispatch import base_of, memory_of, with_memory
from shardwise.private_torch.tracing import is_recorded
from shardwise.tensor.placed import note_placed
from shardwise.tensor.waiting import waiting

__all__ = ["move", "part_of", "tensor_of"]


def move(tensor: Any, target: TensorSpec, steps: StepRunner | None, async_op: bool) -> Any:
    """The tensor under the placements of another spec. ``steps`` move its part, or nothing does."""
    local = fresh(tensor._local_tensor) if tensor._spec.is_copy else tensor._local_tensor
    if steps is None:
        # The layout stays the same and so does the memory: to autograd the result is a view.
        result = wrap(alias(local), target)
        if tensor._spec.is_copy:
            link_view(tensor, result)
    elif async_op and steps.start is not None and not is_recorded(local):
        result = waiting(steps.start(local).keep(tensor, local), target, local.device)
    else:
        moved_local = steps.run(local)
        if target.is_replicated and type(moved_local) is torch.Tensor:
            note_placed(moved_local)
        result = wrap(moved_local, target)
    origins.derive("redistribute", tensor, result)
    if recording.recorder is not None:
        recording.recorder.redistributed(tensor, result)
    return result


def part_of(tensor: Any) -> torch.Tensor:
    """A new tensor over the local memory.

    A write to the memory of a view counts as one to its base: torch's counters of local tensors do not know that a view
    of a MeshTensor is one.
    """
    local: torch.Tensor = tensor._local_tensor
    base: Any = base_of(tensor)
    if base is not None and type(local) is torch.Tensor:
        whole = base._local_tensor
        is_same = local.dtype is whole.dtype and not local.is_complex() and local.is_neg() == whole.is_neg()
        if is_same and memory_of(local) == memory_of(whole):
            part: torch.Tensor = whole.as_strided(local.shape, local.stride(), local.storage_offset())
            return part
    return alias(local)


def tensor_of(local: torch.Tensor, spec: TensorSpec) -> Any:
    """The MeshTensor of a part."""
    # Every rank has the same spec, and an empty part does not say how the others lie. So the part takes the strides of
    # the spec.
    part = in_order(with_memory(local), spec.tensor_meta)
    tensor = wrap(part.detach(), spec)  # inside a MeshTensor nothing requires a gradient
    leave_out(tensor)
    return tensor
