"""Meshes for tests: made once per worker process."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["mesh"]


@cache
def mesh(shape: tuple[int, ...] = (4,), names: tuple[str, ...] | None = None, device_type: str = "cpu") -> DeviceMesh:
    """A mesh over this worker's process group, cached per process; every rank must call this.

    ``shape`` must hold exactly the group's ranks. On ``cuda`` several ranks share a device where there are
    fewer devices than ranks.
    """
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return init_device_mesh(device_type, shape, mesh_dim_names=names)
