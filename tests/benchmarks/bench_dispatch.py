"""Warm dispatch of one op: shardwise beside DTensor and bare local tensors, in one process, interleaved.

Run it with ``python tests/benchmarks/bench_dispatch.py [--rounds 7] [--calls 300] [--json FILE]``. The fake process
group takes communication away, so that overhead shows. Only the ratios carry over to another machine.
"""

import json
import math
import statistics
import timeit
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Replicate, Shard

KINDS = ("shardwise", "DTensor", "plain")

# Each takes x f32[8,16] S(0), y like x, w f32[16,12] S(1) on the second mesh dim.
OPS = {
    "mm": lambda x, _, w: x @ w,
    "add": lambda x, y, _: x + y,
    "add a number": lambda x, *_: x + 1.5,
    "mul_": lambda x, *_: x.mul_(1.0),
    "relu": lambda x, *_: torch.relu(x),
    "gelu": lambda x, *_: functional.gelu(x),
    "where": lambda x, y, _: torch.where(x > 0, x, y),
    "t": lambda x, *_: x.t(),
    "transpose": lambda x, *_: x.transpose(0, 1),
    "view": lambda x, *_: x.view(x.shape[0], 4, 4),
    "slice": lambda x, *_: x[:, 2:5],
    "split": lambda x, *_: x.split(4, 1),
    "cat": lambda x, y, _: torch.cat([x, y], 1),
    "sum": lambda x, *_: x.sum(1),
    "softmax": lambda x, *_: torch.softmax(x, -1),
    "layer_norm": lambda x, *_: functional.layer_norm(x, (16,)),
    "zeros_like": lambda x, *_: torch.zeros_like(x),
    "detach": lambda x, *_: x.detach(),
}


def operands(mesh, layout):
    """The three operands as each library has them."""
    placed = [(torch.randn(8, 16), layout[0]), (torch.randn(8, 16), layout[0]), (torch.randn(16, 12), layout[1])]
    ours = [sw.distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in placed]
    return ours, [t.to_dtensor() for t in ours], [t.to_local() for t in ours]


def measure(run, sets, rounds, calls):
    """Median microseconds per call for each library."""
    times = [[] for _ in sets]
    for operands_ in sets:
        run(*operands_)
    for _ in range(rounds):
        for found, operands_ in zip(times, sets, strict=True):
            found.append(timeit.timeit(lambda o=operands_: run(*o), number=calls) / calls * 1e6)
    return dict(zip(KINDS, map(statistics.median, times), strict=True))


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--calls", default=300, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
def main(rounds, calls, json_file):
    """Print a table of medians and ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    rows = []
    cases = {
        "(4,)": ((4,), ([Shard(0)], [Replicate()])),
        "(2, 2)": ((2, 2), ([Shard(0), Replicate()], [Replicate(), Shard(1)])),
    }
    for name, (shape, layout) in cases.items():
        sets = operands(init_device_mesh("cpu", shape), layout)
        with torch.no_grad():
            rows += [{"mesh": name, "op": op, **measure(run, sets, rounds, calls)} for op, run in OPS.items()]
    show(rows)
    if json_file:
        Path(json_file).write_text(json.dumps(rows, indent=2))
    dist.destroy_process_group()


def show(rows):
    """The table, and the geometric mean of the ratios."""
    table = Table("mesh", "op", *KINDS, "of DTensor", title=f"warm dispatch, microseconds, torch {torch.__version__}")
    ratios = [row["shardwise"] / row["DTensor"] for row in rows]
    for row, ratio in zip(rows, ratios, strict=True):
        table.add_row(row["mesh"], row["op"], *(f"{row[k]:.1f}" for k in KINDS), f"{ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(f"geometric mean of DTensor: {math.exp(statistics.fmean(map(math.log, ratios))):.2f}")


if __name__ == "__main__":
    main()
