"""One training step of the demo, for tools that follow a step: ``shardwise lock shardwise.demo.step:step``."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.demo.data import batches
from shardwise.demo.model import build
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.demo.settings import RunSettings
from shardwise.demo.training import train
from shardwise.kernel.placements import REPLICATE, Shard

__all__ = ["step"]


def step(mesh: DeviceMesh) -> None:
    """The demo's first step on a mesh with the dim ``tp``, and perhaps ``dp``, as the demo trains without learning."""
    settings = RunSettings(mesh=tuple(mesh.shape), steps=1, learn=False)
    model = sw.distribute_module(build(settings), mesh, TENSOR_PARALLEL, src_data_rank=None)
    rows = [Shard(0) if name == "dp" else REPLICATE for name in mesh.mesh_dim_names or ()]

    def place(batch: Tensor) -> Tensor:
        return sw.distribute_tensor(batch, mesh, rows, src_data_rank=None)

    train(model, batches(settings), settings, place, lambda _: None, None, sw.accumulate)
