"""Memory: what a cached signature holds, and the peak of the demo's step.

Run it with ``python tests/benchmarks/bench_memory.py [--calls 500] [--json FILE]``.

A signature: fresh ``mm`` and ``add`` calls, with sizes never seen before; what stays allocated when the operands are
gone, divided by the calls. "traced" is what ``tracemalloc`` sees, Python's own objects; "resident" is the growth of
the process, which counts C++ objects too, but in whole pages. Each figure comes from a fresh process. Then many more
signatures than the caches keep show whether memory levels off.

A step: every allocation of torch's CPU allocator over two steps on one rank under the fake process group, as the
profiler records them, added up; the peak of that sum, without and with what stays (parameters, optimizer state). The
step by hand contains the buffers of its collectives.
"""

import gc
import itertools
import json
import subprocess
import sys
import tracemalloc

import click
import psutil
import torch
from gpt import FREE, PINNED, batch, clip, clip_plain, mesh_model, plain_model, training_step
from measuring import DTENSOR, OURS, PLAIN, console, fake_world, line, options, report
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.demo.settings import RunSettings

SIGNATURE_LIMIT = 2048
STEP_LIMIT = 1.05
WARM_UP = 100
LEVEL_CALLS = 20_000
"""Signatures of two ops in two halves: each half holds more per op than the plan store keeps (4,096)."""
TRACED, RESIDENT, LEVEL = "traced", "resident", "level"

FROM_LOCAL = {OURS: sw.MeshTensor.from_local, DTENSOR: DTensor.from_local}


# -- signatures, each figure in a fresh process ------------------------------------------------------------------


def fresh_calls(kind):
    """Calls that are two new signatures each: an mm whose operands are sharded over both mesh dims, and an add."""
    mesh = init_device_mesh("cpu", (2, 2))
    rows, columns = [Shard(0), Replicate()], [Replicate(), Shard(1)]

    def tensor(shape, placements):
        return FROM_LOCAL[kind](torch.empty(shape), mesh, placements, run_check=False)

    for n in itertools.count(1):
        yield lambda n=n: (
            torch.mm(tensor((n, 16), rows), tensor((16, 6), columns)),
            torch.add(tensor((n, 8), rows), tensor((n, 8), rows)),
        )


def held(kind, what, calls):
    """Bytes per signature; for "level" bytes per signature of the first and of the second half of the calls."""
    with fake_world(4), torch.no_grad():
        runs = fresh_calls(kind)
        _run(runs, WARM_UP)
        if what == TRACED:
            tracemalloc.start()
        read = _traced if what == TRACED else _resident
        marks = [read()]
        for _ in range(2 if what == LEVEL else 1):
            _run(runs, calls)
            marks.append(read())
    return [(after - before) / (2 * calls) for before, after in itertools.pairwise(marks)]


def _run(runs, calls):
    for run in itertools.islice(runs, calls):
        run()


def _traced():
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def in_fresh_process(kind, what, calls):
    command = [sys.executable, __file__, "--child", kind, what, "--calls", str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def signature_rows(calls, level_calls):
    rows = []
    for kind in (OURS, DTENSOR):
        row = {"library": kind}
        for what in (TRACED, RESIDENT):
            (row[what],) = in_fresh_process(kind, what, calls)
        rows.append(row)
    rows[0]["first half"], rows[0]["second half"] = in_fresh_process(OURS, LEVEL, level_calls // 4)
    return rows


# -- the demo's step ---------------------------------------------------------------------------------------------


def peak(step, model):
    """Peak of what two steps allocate, in bytes; the second one starts with the gradients of the first."""
    for _ in range(2):
        step()
    model.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def static_bytes(model):
    """Parameters, buffers, and AdamW's two states per parameter; local bytes."""
    parameters = sum(_local(p).nbytes for p in model.parameters())
    return 3 * parameters + sum(_local(b).nbytes for b in model.buffers())


def _local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, sw.MeshTensor) else tensor


def step_rows(settings):
    with fake_world(settings.world_size):
        mesh = init_device_mesh("cpu", settings.mesh, mesh_dim_names=settings.mesh_names)
        ids, targets = batch(settings)
        ours = [sw.distribute_tensor(t, mesh, None, src_data_rank=None) for t in (ids, targets)]
        plain = plain_model(settings, mesh, PINNED, fused_attention=True)
        by_hand = peak(training_step(plain, ids, targets, settings, clip_plain), plain)
        rows = []
        for layout in (PINNED, FREE):
            model = mesh_model(settings, mesh, layout, fused_attention=True)
            peak_bytes = peak(training_step(model, *ours, settings, clip), model)
            rows.append({"layout": layout, OURS: peak_bytes, PLAIN: by_hand, "static": static_bytes(model)})
            assert rows[-1]["static"] == static_bytes(plain), "the kinds hold different parameters"
    return rows


# -- results -----------------------------------------------------------------------------------------------------


def lines(signatures, steps):
    ours, beside = signatures
    worst = max(ours[TRACED], ours[RESIDENT])
    yield line(
        "memory per cached signature (plan, key, specs): traced / resident",
        f"≤ {SIGNATURE_LIMIT:,} B",
        f"{ours[TRACED]:,.0f} / {ours[RESIDENT]:,.0f} B",
        met=worst <= SIGNATURE_LIMIT,
        dtensor=f"{beside[TRACED]:,.0f} / {beside[RESIDENT]:,.0f} B",
    )
    work = "- ever-new shapes: resident bytes per signature, first and second half"
    yield line(
        work,
        "levels off",
        f"{ours['first half']:,.0f}, then {ours['second half']:,.0f} B",
        met=ours["second half"] < max(ours["first half"], SIGNATURE_LIMIT) / 10,
    )
    for row in steps:
        ratio = row[OURS] / row[PLAIN]
        whole = (row[OURS] + row["static"]) / (row[PLAIN] + row["static"])
        work = f"peak of the demo's step over the step by hand ({row['layout']} layout); with parameters and state"
        yield line(work, f"≤ {STEP_LIMIT}x plain", f"{ratio:.3f}x; {whole:.3f}x", met=max(ratio, whole) <= STEP_LIMIT)


@click.command()
@options(calls=500)
@click.option("--level-calls", default=LEVEL_CALLS, show_default=True, help="Signatures made to see memory level off.")
@click.option("--child", nargs=2, hidden=True)
def main(rounds, calls, json_file, level_calls, child):
    """Print bytes per signature and the peaks."""
    if child:
        click.echo(json.dumps(held(*child, calls)))
        return
    signatures = signature_rows(calls, level_calls)
    steps = step_rows(RunSettings(mesh=(4,)))
    table = Table("library", TRACED, RESIDENT, title="bytes per cached signature")
    for row in signatures:
        table.add_row(row["library"], f"{row[TRACED]:,.0f}", f"{row[RESIDENT]:,.0f}")
    console().print(table)
    table = Table("layout", OURS, PLAIN, "static", title="peak of the demo's step, MiB")
    for row in steps:
        table.add_row(row["layout"], *(f"{row[name] / 2**20:.2f}" for name in (OURS, PLAIN, "static")))
    console().print(table)
    report([*signatures, *steps], [*lines(signatures, steps)], json_file)


if __name__ == "__main__":
    main()
