"""Random ops in each of shardwise's ways to draw, beside torch's generator: what one rank of a mesh pays.

Run it with ``python tests/benchmarks/bench_random.py [--rounds 7] [--calls 3] [--size 1048576] [--json FILE]``. A
tensor is filled in place under the fake process group, whole on one rank and cut over eight; ``plain`` fills the whole
tensor on one device with torch alone. ``counter`` draws the rank's part by place, ``torch`` the whole on every rank,
``local`` the rank's part by a generator of its own. DTensor is left out: on a CPU mesh each of its ranks draws the same
numbers for its own part.
"""

import click
import torch
from measuring import PLAIN, console, fake_world, interleaved, line, options, report
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Shard

WAYS = ("counter", "torch", "local")
RANKS = 8
DRAWS = {
    "uniform_": (),
    "normal_": (),
    "bernoulli_": (0.1,),
    "exponential_": (),
    "random_": (0, 50_000),
}


def filling(tensor, name, way=None):
    fill, args = getattr(tensor, name), DRAWS[name]
    if way is None:
        return lambda: fill(*args)

    def run():
        with sw.random.using(way):
            fill(*args)

    return run


def measure(mesh, size, name, dtype, rounds, calls):
    tensor = sw.empty(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
    runs = {PLAIN: filling(torch.empty(size, dtype=dtype), name)}
    return interleaved(runs | {way: filling(tensor, name, way) for way in WAYS}, rounds, calls)


@click.command()
@click.option("--size", default=1 << 20, show_default=True, help="Elements of the tensor that is filled.")
@options(calls=3)
def main(rounds, calls, json_file, size):
    """Print a table of medians and ratios to torch on one device."""
    rows = []
    for ranks in (1, RANKS):
        with fake_world(ranks):
            mesh = init_device_mesh("cpu", (ranks,))
            for elements in (size, 64):
                for name in DRAWS:
                    for dtype in (
                        (torch.float32, torch.float64) if name in ("uniform_", "normal_") else (torch.float32,)
                    ):
                        head = {"ranks": ranks, "elements": elements, "op": name, "dtype": str(dtype)[6:]}
                        rows.append({**head, **measure(mesh, elements, name, dtype, rounds, calls)})
    console().print(table(rows))
    report(rows, [*lines(rows, size)], json_file)


def table(rows):
    table = Table("ranks", "elements", "op", "dtype", PLAIN, *WAYS, title=f"microseconds, torch {torch.__version__}")
    for row in rows:
        times = (f"{row[kind] * 1e6:,.0f}" for kind in (PLAIN, *WAYS))
        table.add_row(str(row["ranks"]), f"{row['elements']:,}", row["op"], row["dtype"], *times)
    return table


def lines(rows, size):
    """Nobody set a target: the promise is the numbers, and the figures say what it costs."""
    for row in rows:
        if row["elements"] == size and row["dtype"] == "float32":
            ratios = ", ".join(f"{way} {row[way] / row[PLAIN]:.2f}" for way in WAYS)
            work = f"{row['op']} of {size:,} in {row['ranks']} shards, of torch's on one device"
            yield line(work, "-", ratios, met=None)


if __name__ == "__main__":
    main()
