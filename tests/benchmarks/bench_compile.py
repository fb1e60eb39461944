"""A GPT training step under ``torch.compile``: shardwise beside DTensor and bare local tensors, interleaved.

Run it with ``python tests/benchmarks/bench_compile.py [--backend inductor] [--width 64] [--rounds 9] [--json FILE]``.
Tensor-parallel over four ranks of the fake process group: communication costs nothing, so that overhead shows. "plain"
is the same work by hand: local shards, and a functional all-reduce where a layer needs one. ``--profile`` prints where
the time between the compiled graphs goes. Only the ratios carry over to another machine.
"""

import copy
import cProfile
import json
import pstats
import statistics
import time
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.demo.model import GPT

RANKS = 4
KINDS = ("shardwise", "DTensor", "plain")
PLACES = {
    "blocks.*.attention.w[qkv].weight": [Shard(0)],
    "blocks.*.attention.wo.weight": [Shard(1)],
    "blocks.*.feed.up.weight": [Shard(0)],
    "blocks.*.feed.down.weight": [Shard(1)],
}


class MaskedAttention(nn.Module):
    """The demo's attention written out: DTensor has no rule for the fused one on CPU.

    Heads come first, before the batch: what is sharded must be the outer part of the dim that ``bmm`` sees.
    """

    def __init__(self, attention, context):
        super().__init__()
        self.heads = attention.heads
        self.wq, self.wk, self.wv, self.wo = attention.wq, attention.wk, attention.wv, attention.wo
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + self.mask
        return self.wo((torch.softmax(scores, -1) @ v).permute(1, 2, 0, 3).flatten(2))


class Copied(torch.autograd.Function):
    """Into the parallel part: the same on every rank, gradients added up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return functional_collectives.all_reduce(grad, "sum", ctx.group), None


class Added(torch.autograd.Function):
    """Out of the parallel part: the ranks' terms added up."""

    @staticmethod
    def forward(_, x, group):
        return functional_collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(_, grad):
        return grad, None


def placed(model, mesh, make):
    """The model with each parameter replaced by ``make`` of its MeshTensor."""
    spread = sw.distribute_module(copy.deepcopy(model), mesh, PLACES, src_data_rank=None)
    for module in spread.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(make(parameter.detach())))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, make(buffer))
    return spread


def gpt(layers, width, heads, context, **_):
    model = GPT(layers=layers, width=width, heads=heads, context=context)
    for block in model.blocks:
        block.attention = MaskedAttention(block.attention, context)
    return model


def parallel(model, enter, leave):
    """Run ``enter`` on what goes into the parallel half of a layer and ``leave`` on what comes out."""
    for block in model.blocks:
        for half, last in ((block.attention, block.attention.wo), (block.feed, block.feed.down)):
            half.register_forward_pre_hook(lambda _, inputs: (enter(inputs[0]),))
            last.register_forward_hook(lambda _, __, output: leave(output))
    return model


def by_hand(model, mesh):
    """Megatron's tensor parallelism on bare tensors."""
    group = mesh.get_group(0)
    local = placed(model, mesh, lambda t: t.to_local().clone())
    for block in local.blocks:
        block.attention.heads //= RANKS
    return parallel(local, lambda x: Copied.apply(x, group), lambda x: Added.apply(x, group))


def as_megatron(model):
    """Say Megatron's layouts for activations too; otherwise each op's cheapest plan is taken."""
    whole = [Replicate()]
    return parallel(
        model,
        lambda x: x.redistribute(placements=whole, grad_placements=whole),
        lambda x: x.redistribute(placements=whole),
    )


def loss_of(model, ids, target):
    return functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def step_of(model, backend, data, optimizer):
    """One training step; forward and backward are compiled, and with ``optimizer`` a compiled AdamW follows."""
    compiled = torch.compile(loss_of, backend=backend, fullgraph=True, dynamic=False)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update = torch.compile(adam.step, backend=backend, fullgraph=True, dynamic=False) if optimizer else None

    def step():
        compiled(model, *data).backward()
        if update is not None:
            update()
        adam.zero_grad()

    return step


def steps(mesh, settings, backend, optimizer, free):
    """A step for each library, from the same weights and data."""
    torch.manual_seed(0)
    model = gpt(**settings)
    data = torch.randint(256, (2, settings["batch"], settings["context"])).unbind()
    ours = [sw.distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in data]
    mine = placed(model, mesh, lambda t: t)
    models = {
        "shardwise": (mine if free else as_megatron(mine), ours),
        "DTensor": (placed(model, mesh, lambda t: t.to_dtensor()), [t.to_dtensor() for t in ours]),
        "plain": (by_hand(model, mesh), list(data)),
    }
    return {kind: step_of(m, backend, d, optimizer) for kind, (m, d) in models.items()}


def measure(runs, rounds, calls):
    """Median milliseconds per step, and the seconds that the first step took to compile."""
    compiling = {}
    for kind, run in runs.items():
        start = time.perf_counter()
        run()
        run()
        compiling[kind] = time.perf_counter() - start
    times = {kind: [] for kind in runs}
    for _ in range(rounds):
        for kind, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[kind].append((time.perf_counter() - start) / calls * 1e3)
    return {kind: statistics.median(found) for kind, found in times.items()}, compiling


def profile(kind, run, calls):
    """Where the time of one library goes, by own time."""
    click.echo(f"{kind}, {calls} steps")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        run()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


@click.command()
@click.option("--backend", default="inductor", show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--context", default=32, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--calls", default=10, show_default=True)
@click.option("--optimizer", is_flag=True, help="Let a compiled AdamW step follow.")
@click.option("--free", is_flag=True, help="Leave the layout of activations to shardwise.")
@click.option("--profile", "profiled", is_flag=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
def main(backend, rounds, calls, optimizer, free, profiled, json_file, **settings):
    """Print medians and ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    runs = steps(init_device_mesh("cpu", (RANKS,)), settings, backend, optimizer, free)
    medians, compiling = measure(runs, rounds, calls)
    title = f"a compiled step ({backend}), torch {torch.__version__}"
    table = Table("library", "ms per step", "of plain", "compiling, s", title=title)
    for kind in KINDS:
        table.add_row(kind, f"{medians[kind]:.2f}", f"{medians[kind] / medians['plain']:.2f}", f"{compiling[kind]:.0f}")
    Console().print(table)
    if profiled:
        for kind, run in runs.items():
            profile(kind, run, calls * rounds)
    if json_file:
        Path(json_file).write_text(json.dumps({"ms": medians, "compiling s": compiling, **settings}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
