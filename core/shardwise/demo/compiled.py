"""Proof of what ``torch.compile`` makes of the demo's model: its graphs, what is in them, and its numbers.

``python -m shardwise.demo.compiled --mesh 2x2`` trains a few steps with batches of several sizes, on local processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise as sw
from shardwise.comm.events import observe
from shardwise.demo.model import BYTES, build
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.demo.settings import MESH_NAMES, RunSettings
from shardwise.kernel.placements import REPLICATE, Placement, Shard
from shardwise.private_torch.tracing import seeing_graphs
from shardwise.testing.pool import WorkerPool

__all__ = ["CompiledStep", "prove"]


@frozen
class CompiledStep:
    """One compiled step: its batch, how many graphs it made (forward and backward each count), the functional
    collectives in them by name, the collectives that ran outside of them, and the largest difference from eager mode.
    """

    batch: int
    graphs: int
    collectives: dict[str, int]
    outside: int
    difference: float


def _loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def prove(settings: RunSettings, batches: Sequence[int]) -> list[CompiledStep]:
    """Run on this rank of the default process group: one step a batch, in eager mode and compiled without a break."""
    torch.compiler.reset()
    mesh = init_device_mesh(settings.device, settings.mesh, mesh_dim_names=settings.mesh_names)
    places: list[Placement] = [Shard(0) if name == "dp" else REPLICATE for name in settings.mesh_names]
    model = sw.distribute_module(build(settings).double(), mesh, TENSOR_PARALLEL, src_data_rank=None)
    graphs: list[Any] = []
    compiled = torch.compile(_loss, backend=seeing_graphs(graphs.append), fullgraph=True)
    steps = []
    for batch in batches:
        values = torch.randint(BYTES, (2, batch, settings.context), generator=torch.Generator().manual_seed(batch))
        ids, targets = (sw.distribute_tensor(t, mesh, places, src_data_rank=None) for t in values.unbind())
        expected = _loss_and_gradients(_loss, model, ids, targets)
        graphs.clear()
        outside: list[Any] = []
        with observe(outside.append):
            actual = _loss_and_gradients(compiled, model, ids, targets)
        apart = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
        names = (str(node.target) for graph in graphs for node in graph.graph.nodes)
        counts = Counter(name.split(".")[1] for name in names if name.startswith("_c10d_functional."))
        counts.pop("wait_tensor", None)
        steps.append(CompiledStep(batch, len(graphs), dict(sorted(counts.items())), len(outside), apart))
    return steps


def _loss_and_gradients(loss: Any, model: nn.Module, ids: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss and all gradients, as local tensors."""
    model.zero_grad()
    value = loss(model, ids, targets)
    value.backward()
    whole: list[Any] = [value.detach(), *(p.grad for p in model.parameters())]
    return [t.to_local().detach() for t in whole]


@click.command()
@click.option("--mesh", "shape", default="2x2", show_default=True, help="4, or 2x2 (dp x tp).")
@click.option("--batches", default="8,12,16,8,7", show_default=True, help="The batch of each step.")
@click.option("--layers", type=click.IntRange(1), default=1, show_default=True)
def main(shape: str, batches: str, layers: int) -> None:
    """Compile the demo's model on local processes, and say what graphs it takes."""
    mesh = tuple(map(int, shape.split("x")))
    if len(mesh) not in MESH_NAMES:
        raise click.BadParameter(f"{shape!r} is not a mesh: write 4 or 2x2")
    settings = evolve(RunSettings(), mesh=mesh, layers=layers, width=32, context=16)
    with WorkerPool(settings.world_size) as pool:
        steps = pool.run(prove, settings, tuple(map(int, batches.split(","))), timeout=None)[0]
    for step in steps:
        held = ", ".join(f"{n} {name}" for name, n in step.collectives.items()) or "nothing new"
        click.echo(
            f"batch {step.batch:3}: {step.graphs} new graphs ({held}); {step.outside} collectives outside; "
            f"largest difference from eager mode {step.difference:.1e}"
        )


if __name__ == "__main__":
    main()
