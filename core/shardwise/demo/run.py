"""One demo run on each rank: train on the mesh, then (rank 0) on one device, and compare."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.demo.checkpoints import Checkpoints
from shardwise.demo.comparison import Comparison, compare
from shardwise.demo.data import batches
from shardwise.demo.model import build
from shardwise.demo.observation import Observed, observing
from shardwise.demo.progress import progress
from shardwise.demo.settings import RunSettings
from shardwise.demo.training import Step, train
from shardwise.kernel.placements import REPLICATE, Placement, Shard
from shardwise.testing.local import take_device

__all__ = ["TENSOR_PARALLEL", "RunResult", "run_rank"]

TENSOR_PARALLEL: dict[str, dict[str, Placement]] = {
    "bytes.weight": {"tp": Shard(0)},
    "blocks.*.attention.w[qkv].weight": {"tp": Shard(0)},
    "blocks.*.attention.wo.weight": {"tp": Shard(1)},
    "blocks.*.feed.up.weight": {"tp": Shard(0)},
    "blocks.*.feed.down.weight": {"tp": Shard(1)},
    "head.weight": {"tp": Shard(0)},
}
"""Where the weights lie: the first linear layer of each pair by rows of its weight, the second by columns."""


@frozen
class RunResult:
    """The steps on the mesh and on one device, what rank 0 observed, the comparison, and what was learned, in words."""

    settings: RunSettings
    backend: str
    steps: list[Step]
    single_steps: list[Step]
    observed: Observed
    comparison: Comparison
    learned: str | None


def run_rank(settings: RunSettings, checkpoints: Checkpoints | None = None) -> RunResult | None:
    """Run on this rank of the default process group; rank 0 returns the result, the others None."""
    rank = dist.get_rank()
    take_device(settings.device, rank)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // settings.world_size))
    mesh = init_device_mesh(settings.device, settings.mesh, mesh_dim_names=settings.mesh_names)
    steps, parameters, observed, learned = _train_on_mesh(settings, mesh, checkpoints, shown=rank == 0)
    if rank != 0:
        return None
    model = build(settings).to(settings.device)
    with progress("one device", settings, shown=True) as tell:
        single_steps = train(model, batches(settings), settings, lambda batch: batch.to(settings.device), tell)
    comparison = compare(settings, (steps, parameters), (single_steps, _whole_parameters(model)))
    return RunResult(settings, dist.get_backend(), steps, single_steps, observed, comparison, learned)


def _train_on_mesh(
    settings: RunSettings, mesh: DeviceMesh, checkpoints: Checkpoints | None, *, shown: bool
) -> tuple[list[Step], dict[str, Tensor], Observed, str | None]:
    model = sw.distribute_module(build(settings).to(settings.device), mesh, TENSOR_PARALLEL, src_data_rank=None)
    # Every rank has the same weights and batches from the seed, so nothing is sent (src_data_rank=None).
    batch_placements = [Shard(0) if name == "dp" else REPLICATE for name in settings.mesh_names]

    def place(batch: Tensor) -> Tensor:
        return sw.distribute_tensor(batch.to(settings.device), mesh, batch_placements, src_data_rank=None)

    title = f"mesh {settings.mesh_text} ({', '.join(settings.mesh_names)})"
    with sw.learn(settings.learn) as learning, observing() as observed, progress(title, settings, shown=shown) as tell:
        # Gradients are summed over the mesh together, after each backward pass.
        steps = train(model, batches(settings), settings, place, tell, checkpoints, sw.accumulate)
    learned = None if learning.learned is None else str(learning.learned)
    return steps, _whole_parameters(model), observed, learned


def _whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {
            name: (parameter.full_tensor() if isinstance(parameter, sw.MeshTensor) else parameter.detach()).cpu()
            for name, parameter in model.named_parameters()
        }
