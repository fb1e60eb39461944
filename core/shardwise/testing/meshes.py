"""Meshes for tests: made once per worker process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.kernel.arguments import refuse_argument

__all__ = ["mesh"]


def mesh(shape: Sequence[int] = (4,), names: tuple[str, ...] | None = None, device_type: str = "cpu") -> DeviceMesh:
    """A mesh over this worker's process group, cached per process; every rank must call this.

    ``shape`` must hold exactly the group's ranks. On ``cuda`` several ranks share a device where there are
    fewer devices than ranks.
    """
    if not isinstance(shape, Sequence):
        refuse_argument("make a mesh of a test", "shape", shape, "Give the sizes of its dims, as in mesh((2, 2)).")
    return _mesh(tuple(shape), names, device_type)


@cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None, device_type: str) -> DeviceMesh:
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return init_device_mesh(device_type, shape, mesh_dim_names=names)
