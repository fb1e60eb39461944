"""The first dispatch of a fresh signature: shardwise beside DTensor on meshes of one to five dims.

Run it with ``python tests/benchmarks/bench_cold.py [--rounds 9] [--case-seconds 12] [--json FILE] [--plot FILE]``.
Every call has sizes never seen before; the process is warm (plugins loaded, the op called with other sizes). Layouts:
"placed" needs no communication, "random" draws each operand's placements from all shards and replicated (seeded), so
that operands must move. A case stops after ``--case-seconds`` of one library. DTensor's time grows with rows to the
power of mesh dims: its cases are left out when the one before says that a single call would take longer.
"""

import itertools
import random
import statistics
import time
from pathlib import Path

import click
import matplotlib as mpl
import torch
from measuring import DTENSOR, OURS, console, fake_world, line, options, report, seconds
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise import Replicate, Shard

MESHES = {"(8,)": (8,), "(2,4)": (2, 4), "(2,2,2)": (2, 2, 2), "2^4": (2,) * 4, "2^5": (2,) * 5}
MM_LIMITS = {"(8,)": 0.5, "(2,4)": 0.5, "(2,2,2)": 0.7, "2^4": 1.0, "2^5": 1.5}
DEEP_LIMIT, ATTENTION_LIMIT, GROWTH_LIMIT = 2.0, 20.0, 3.0
PLACED, RANDOM = "placed", "random"
SEED = 0
WARM_UP = 3
WARM_DTENSOR = 3
"""Mesh dims up to which DTensor is warmed up: beyond, a call takes seconds, and a first call adds little to it."""

_sizes = itertools.product(range(8, 200, 4), repeat=2)
"""Pairs of sizes that no call of this process had before; small, so that the local work hides nothing."""

# Each op: the shapes of its operands at sizes m and n, and for each the (mesh dim, tensor dim) that "placed" shards.
OPS = {
    "mm": (torch.mm, lambda m, n: [(m, 16), (16, n)], [(0, 0), (1, 1)]),
    "addmm": (torch.addmm, lambda m, n: [(n,), (m, 16), (16, n)], [(1, 0), (0, 0), (1, 1)]),
    "bmm": (torch.bmm, lambda m, n: [(m, n, 8), (m, 8, 16)], [(0, 0), (0, 0)]),
    "add": (torch.add, lambda m, n: [(m, n), (n,)], [(0, 0), None]),
}


def placements(layout, ndim, mesh_ndim, sharded, draw):
    """One operand's; "placed" keeps what its mesh has dims for."""
    if layout == RANDOM:
        return [draw.choice([Replicate(), *map(Shard, range(ndim))]) for _ in range(mesh_ndim)]
    result = [Replicate()] * mesh_ndim
    if sharded is not None and sharded[0] < mesh_ndim:
        result[sharded[0]] = Shard(sharded[1])
    return result


def operands(op, mesh, layout, draw):
    """Fresh operands for both libraries, the same placements in each."""
    _, shapes, places = OPS[op]
    ours = []
    for shape, where in zip(shapes(*next(_sizes)), places, strict=True):
        given = placements(layout, len(shape), mesh.ndim, where, draw)
        ours.append(sw.distribute_tensor(torch.ones(shape), mesh, given, src_data_rank=None))
    return {OURS: ours, DTENSOR: [t.to_dtensor() for t in ours]}


def measure(op, mesh, layout, rounds, case_seconds, kinds):
    """Milliseconds of each first call, in turns; a library stops when its time is up, after one call at least."""
    draw = random.Random(SEED)  # noqa: S311  # layouts, not secrets
    run = OPS[op][0]
    for _ in range(WARM_UP):
        run(*operands(op, mesh, layout, draw)[OURS])
    if DTENSOR in kinds and mesh.ndim <= WARM_DTENSOR:
        run(*operands(op, mesh, layout, draw)[DTENSOR])
    times = {kind: [] for kind in kinds}
    for _ in range(rounds):
        drawn = operands(op, mesh, layout, draw)
        for kind in kinds:
            if not times[kind] or sum(times[kind]) < case_seconds * 1e3:
                times[kind].append(seconds(lambda o=drawn[kind]: run(*o)) * 1e3)
    return times


def row(op, mesh_name, layout, times):
    line = {"op": op, "mesh": mesh_name, "layout": layout}
    for kind, values in times.items():
        if values:
            line |= {kind: statistics.median(values), f"{kind} worst": max(values), f"{kind} calls": len(values)}
    return line


def sweep(op, rounds, case_seconds, meshes=tuple(MESHES)):
    """One op over the meshes; DTensor is left out where its last time, grown as before, is beyond its limit."""
    rows = []
    expected = 0.0
    for name in meshes:
        shape = MESHES[name]
        with fake_world(torch.Size(shape).numel()):
            mesh = init_device_mesh("cpu", shape)
            for layout in (PLACED, RANDOM):
                beside = [DTENSOR] if expected < case_seconds and layout == PLACED else []
                rows.append(row(op, name, layout, measure(op, mesh, layout, rounds, case_seconds, [OURS, *beside])))
                if DTENSOR in rows[-1]:
                    # From 2-D on each mesh dim costs it about ten times the one before.
                    expected = rows[-1][DTENSOR] / 1e3 * 10
    return rows


# -- attention ---------------------------------------------------------------------------------------------------


def attention(rounds):
    """Forward and backward of attention in its math form on (2,2,2), first call at each size; ours alone."""
    with fake_world(8), sdpa_kernel(SDPBackend.MATH):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        place = [Shard(0), Shard(1), Replicate()]
        times = {"forward": [], "forward and backward": []}
        for n in range(rounds + 1):
            shape = (4, 4, 16 + 8 * n, 8)
            q, k, v = (sw.distribute_tensor(torch.randn(shape), mesh, place, src_data_rank=None) for _ in range(3))
            for tensor in (q, k, v):
                tensor.requires_grad_()
            start = time.perf_counter()
            out = functional.scaled_dot_product_attention(q, k, v)
            middle = time.perf_counter()
            out.sum().backward()
            times["forward"].append((middle - start) * 1e3)
            times["forward and backward"].append((time.perf_counter() - start) * 1e3)
    # The first size also makes the handlers.
    return [row(f"attention, {name}", "(2,2,2)", PLACED, {OURS: medians[1:]}) for name, medians in times.items()]


# -- results -----------------------------------------------------------------------------------------------------


def lines(rows):
    """Both layouts must meet a target: a program's operands lie well or badly."""
    ours = {(r["op"], r["mesh"], r["layout"]): r for r in rows}
    beside = {(r["op"], r["mesh"]): r[DTENSOR] for r in rows if DTENSOR in r}

    def entry(work, op, mesh, limit):
        rows_here = [ours[op, mesh, layout] for layout in (PLACED, RANDOM) if (op, mesh, layout) in ours]
        text = "; ".join(f"{r['layout']} {r[OURS]:,.2f} (worst {r[f'{OURS} worst']:,.2f})" for r in rows_here)
        dtensor = f"{beside[op, mesh]:,.1f} ms" if (op, mesh) in beside else "not run"
        met = all(r[OURS] <= limit for r in rows_here)
        return line(work, f"≤ {limit:g} ms", f"{text} ms", met=met, dtensor=dtensor)

    for name, limit in MM_LIMITS.items():
        yield entry(f"first dispatch, `mm`, mesh {name}", "mm", name, limit)
    growth = {layout: ours["mm", "2^5", layout][OURS] / ours["mm", "(8,)", layout][OURS] for layout in (PLACED, RANDOM)}
    text = "; ".join(f"{layout} {times:.1f}x" for layout, times in growth.items())
    yield line("- growth from 1-D to 5-D", f"≤ {GROWTH_LIMIT:g}x", text, met=max(growth.values()) <= GROWTH_LIMIT)
    for op in ("addmm", "bmm", "add"):
        shown = "broadcast `add`" if op == "add" else f"`{op}`"
        yield entry(f"first dispatch, {shown}, mesh 2^5", op, "2^5", DEEP_LIMIT)
    for name in ("forward", "forward and backward"):
        work = f"attention in its math form, first call, {name}, (2,2,2)"
        yield entry(work, f"attention, {name}", "(2,2,2)", ATTENTION_LIMIT)


def plot(rows, file):
    """Cold time of mm against mesh rank, both libraries, on a logarithmic axis."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "shardwise"  # the same figures give the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0))
    for label, kind, layout in (
        (DTENSOR, DTENSOR, PLACED),
        (f"{OURS}, placed", OURS, PLACED),
        (f"{OURS}, random layouts", OURS, RANDOM),
    ):
        points = [
            (len(MESHES[r["mesh"]]), r[kind]) for r in rows if r["op"] == "mm" and r["layout"] == layout and kind in r
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(1, 6), [f"{n}-D\n{name}" for n, name in enumerate(MESHES, start=1)])
    axes.set_ylabel("first dispatch of mm, ms")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if str(file).endswith(".svg") else None)


def table(rows):
    table = Table(
        "op", "mesh", "layout", title=f"first dispatch of fresh signatures: milliseconds, torch {torch.__version__}"
    )
    for head in (OURS, "worst", DTENSOR, "calls"):
        table.add_column(head, justify="right")
    for r in rows:
        beside = (f"{r[DTENSOR]:,.1f}", str(r[f"{DTENSOR} calls"])) if DTENSOR in r else ("-", "-")
        table.add_row(r["op"], r["mesh"], r["layout"], f"{r[OURS]:.2f}", f"{r[f'{OURS} worst']:.2f}", *beside)
    return table


@click.command()
@options(rounds=9)
@click.option("--case-seconds", default=12.0, show_default=True, help="What one library may take in one case.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="A picture (.svg or .png).")
def main(rounds, calls, json_file, case_seconds, plot_file):
    """Print a table of first calls."""
    sweep("mm", 3, case_seconds, ("(8,)",))  # thrown away: a call is fresh, the process is not
    rows = sweep("mm", rounds, case_seconds)
    for op in ("addmm", "bmm", "add"):
        rows += sweep(op, rounds, case_seconds, ("2^5",))
    rows += attention(rounds)
    console().print(table(rows))
    if plot_file:
        plot(rows, plot_file)
    report(rows, [*lines(rows)], json_file)


if __name__ == "__main__":
    main()
