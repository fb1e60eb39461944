"""Communication that overlaps, on four gloo processes: a timeline of two groups, and a training step with prefetch.

Run it with ``python tests/benchmarks/bench_overlap.py [--size 1024] [--width 256] [--rounds 9] [--json FILE]``.

The timeline is rank 0's: two all-gathers over the two dims of a (2, 2) mesh are issued, something is computed, then
the results are used. The training step has its parameters sharded over all four ranks; medians of interleaved rounds,
the slowest rank's time. Where processes share cores, hiding communication behind computing gains little: both want the
same cores.
"""

import statistics
import time

import click
import torch
import torch.distributed as dist
from measuring import line, report
from rich.console import Console
from rich.table import Table
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.events import observe
from shardwise.testing import WorkerPool, mesh

RANKS = 4
MODES = ("at once", "async")
STEPS = ("planned", "gathered at use", "prefetch")


# -- timeline ----------------------------------------------------------------------------------------------------


def timeline(size, rounds):
    """Per mode the median seconds of a round, and the intervals of the last round in milliseconds."""
    m = mesh((2, 2), ("rows", "columns"))
    x = sw.distribute_tensor(torch.ones(size, size), m, [Shard(0), Shard(1)], src_data_rank=None)
    a = torch.ones(size // 2, size // 2)
    seconds, last = {mode: [] for mode in MODES}, {}
    for number in range(rounds + 1):
        for mode in MODES:
            dist.barrier()
            elapsed, last[mode] = one_round(x, a, mode == "async")
            if number:  # the first warms up
                seconds[mode].append(elapsed)
    return {mode: statistics.median(measured) for mode, measured in seconds.items()}, last


def one_round(x, a, async_op):
    """Seconds, and what happened when: gather over both mesh dims, compute, use."""
    times, begin = {}, time.perf_counter()

    def now():
        return (time.perf_counter() - begin) * 1e3

    with observe(
        lambda event: times.setdefault(f"gather over mesh dim {event.mesh_dims[0]}", {}).update({event.phase: now()}),
        phases=("issued", "finished", "waited"),
    ):
        over_rows = x.redistribute(placements=[Replicate(), Shard(1)], async_op=async_op)
        over_columns = x.redistribute(placements=[Shard(0), Replicate()], async_op=async_op)
        start = now()
        for _ in range(2):
            torch.mm(a, a)
        times["compute"] = {"issued": start, "finished": now()}
        for tensor in (over_rows, over_columns):
            tensor.to_local()
    elapsed = time.perf_counter() - begin
    time.sleep(0.01)  # a backend's thread may tell of the end after the wait for it
    return elapsed, times


def show_timeline(console, seconds, intervals):
    for mode in MODES:
        end = max(max(phases.values()) for phases in intervals[mode].values())
        table = Table("", "issued", "finished", "waited", "", title=f"{mode}, milliseconds")
        for name, phases in intervals[mode].items():
            shown = [f"{phases[p]:.1f}" if p in phases else "" for p in ("issued", "finished", "waited")]
            table.add_row(name, *shown, bar(phases["issued"], phases["finished"], end))
        console.print(table)
    console.print(f"async takes {seconds['async'] / seconds['at once']:.2f} of the time (median of rounds)")


def bar(start, finish, end, width=50):
    """One line of a Gantt chart."""
    left, right = (round(t / end * width) for t in (start, finish))
    return " " * left + "#" * max(right - left, 1)


# -- a training step ---------------------------------------------------------------------------------------------


def steps(width, layers, rows, rounds):
    """Per variant this rank's seconds for each round, and the loss after them."""
    m = mesh((RANKS,), ("dp",))
    random = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    batch = sw.distribute_tensor(random, m, [Shard(0)], src_data_rank=None)
    runs = {name: training(name, width, layers, m) for name in STEPS}
    seconds, losses = {name: [] for name in STEPS}, {}
    for number in range(rounds + 1):
        for name, step in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[name] = step(batch)
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds, {name: loss.item() for name, loss in losses.items()}


def training(name, width, layers, m):
    """A function that does one step and gives the loss."""
    torch.manual_seed(0)
    block = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    model = nn.Sequential(*(nn.Sequential(*map(_again, block)) for _ in range(layers)))
    sw.distribute_module(model, m, {"*": {"dp": Shard(0)}})
    if name == "prefetch":
        sw.prefetch(model, "dp")
    elif name == "gathered at use":
        for layer in model:
            for linear in (layer[0], layer[2]):
                linear.forward = _gathering(linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _again(module):
    return type(module)(*([module.in_features, module.out_features] if isinstance(module, nn.Linear) else []))


def _gathering(linear):
    def forward(x):
        weight, bias = (p.redistribute(placements=[Replicate()]) for p in (linear.weight, linear.bias))
        return nn.functional.linear(x, weight, bias)

    return forward


def show_steps(console, seconds):
    table = Table(
        "parameters", "ms", "of gathered at use", title="a training step, parameters sharded over the data dim"
    )
    for name in STEPS:
        ratio = seconds[name] / seconds["gathered at use"]
        table.add_row(name, f"{seconds[name] * 1e3:.1f}", f"{ratio:.2f}")
    console.print(table)


def lines(timeline_seconds, step_seconds):
    """The lines of docs/performance.md."""
    overlapped = timeline_seconds["async"] / timeline_seconds["at once"]
    ahead = step_seconds["prefetch"] / step_seconds["gathered at use"]
    two = "two all-gathers over different groups and a computation, four gloo ranks, async over one after the other"
    ahead_of = "training step, parameters sharded over the data dim, four gloo ranks, prefetch over gathers at use"
    return [
        line(two, "< 1", f"{overlapped:.2f}", met=overlapped < 1),
        line(ahead_of, "< 1", f"{ahead:.2f}", met=ahead < 1),
    ]


@click.command()
@click.option("--size", default=1024, show_default=True, help="Rows and columns of the tensor of the timeline.")
@click.option("--width", default=256, show_default=True, help="Width of the model.")
@click.option("--layers", default=6, show_default=True)
@click.option("--rows", default=512, show_default=True, help="Rows of the whole batch.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
def main(size, width, layers, rows, rounds, json_file):
    """Print both."""
    console = Console(width=120)
    with WorkerPool(RANKS) as pool:
        seconds, intervals = pool.run(timeline, size, rounds, timeout=200)[0]
        show_timeline(console, seconds, intervals)
        ranks = pool.run(steps, width, layers, rows, rounds, timeout=200)
    losses = [found for _, found in ranks]
    slowest = {n: statistics.median(map(max, zip(*(times[n] for times, _ in ranks), strict=True))) for n in STEPS}
    show_steps(console, slowest)
    console.print("loss after them: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses[0].items()))
    rows_ = [{"what": name, "seconds": value} for name, value in {**seconds, **slowest}.items()]
    report(rows_, lines(seconds, slowest), json_file, intervals=intervals, losses=losses[0])


if __name__ == "__main__":
    main()
