"""The demo's model at 7 billion parameters: ``shardwise rehearse shardwise.demo.large:seven_billion`` follows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import shardwise as sw
from shardwise.demo.model import GPT, Attention, FeedForward
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.kernel.placements import REPLICATE, Placement, Shard

__all__ = ["placed_step", "seven_billion", "seven_billion_to_plan"]

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 32, 4288, 32, 4096, 128
"""12 * 32 * 4288 ** 2 parameters and a few: 7.08 billion. Two sequences of 4,096 bytes a rank on 8 x 16 x 8."""


class WithLoss(nn.Module):
    """A model and its loss, so that a step has one number to start its backward pass from."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats per byte."""
        return functional.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())


def seven_billion(mesh: DeviceMesh) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    """One training step at 7 billion parameters on a mesh whose dims are named: ``tp`` is tensor parallel, all others
    share the batch.
    """
    return placed_step(mesh, layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT, batch=BATCH)


def seven_billion_to_plan(
    mesh: DeviceMesh,
) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    """The same step with weights and batch placed and no activation: ``shardwise plan`` finds where those lie."""
    return placed_step(
        mesh, layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT, batch=BATCH, places_activations=False
    )


def placed_step(
    mesh: DeviceMesh,
    *,
    layers: int,
    width: int,
    heads: int,
    context: int,
    batch: int,
    places_activations: bool = True,
) -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    """The model with its loss, one batch of zeros, and AdamW, all on the mesh.

    ``places_activations`` redistributes activations by hand at two places per layer.
    """
    names = mesh.mesh_dim_names or ()
    rows: list[Placement] = [REPLICATE if name == "tp" else Shard(0) for name in names]

    def whole_rows(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.redistribute(placements=rows)

    model = GPT(layers=layers, width=width, heads=heads, context=context)
    sw.distribute_module(model, mesh, TENSOR_PARALLEL, src_data_rank=None)
    # Partial results of tensor parallelism are reduced at the end of each half of a layer. Otherwise each op takes its
    # own cheapest strategy, and the next op pays for it.
    for module in model.modules():
        if places_activations and isinstance(module, (nn.Embedding, Attention, FeedForward)):
            module.register_forward_hook(whole_rows)
    ids = torch.zeros(batch, context, dtype=torch.int64, device=mesh.device_type)
    batch_ids = sw.distribute_tensor(ids, mesh, rows, src_data_rank=None)
    # Fused: one operator for all parameters.
    return WithLoss(model), (batch_ids, batch_ids), torch.optim.AdamW(model.parameters(), fused=True)
