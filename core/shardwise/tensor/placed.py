"""Whether anybody has said how a tensor is to lie.

A model that is built under :func:`shardwise.on` has replicated parameters, made by factories and by ops on what these
made. They wait for ``distribute_module``, which may place each of them once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.kernel.placements import REPLICATE

__all__ = ["is_unplaced", "note_placed"]

_PLACED = "shardwise_placed"  # an attribute of a storage, which every view of it has


def note_placed(local: torch.Tensor) -> None:
    """Note that the program has said how the tensor with this part is to lie: by a call with placements."""
    setattr(local.untyped_storage(), _PLACED, True)


def is_unplaced(tensor: Any, mesh: DeviceMesh) -> bool:
    """Whether a tensor lies on a mesh, replicated, and the program has not said that it is to lie so."""
    return bool(
        tensor.device_mesh == mesh
        and all(place == REPLICATE for place in tensor.placements)
        and not hasattr(tensor._local_tensor.untyped_storage(), _PLACED)
    )
