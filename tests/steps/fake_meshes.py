"""A mesh of a fake process group: one rank, which sends nothing."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.engine.decided import use_decisions
from shardwise.engine.shutdown import let_go

__all__ = ["fake_mesh"]


@contextmanager
def fake_mesh(*shape):
    """A mesh of this shape; decisions end with it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=torch.Size(shape).numel())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp", "tp")[-len(shape) :])
    finally:
        use_decisions(None)
        let_go()
        dist.destroy_process_group()
