"""The GPT training step of ``bench_step``, learned: from its second step on it runs by decisions for the whole step.

Run it with ``python tests/benchmarks/bench_learn.py [--mode fake --mode gloo] [--rounds 7] [--calls 3] [--json FILE]``.
"learned" has the free layout: only weights are placed. Beside it, in turns: the same without learning, the pinned
layout, and the program by hand. Before anything is timed, the losses of learned steps are compared with one device's.
It also prints the collectives of a step of each, what recording adds to a first step, and what deciding takes.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from bench_step import RANKS, WHERE, _from_barrier_to_barrier, check_losses, tp_mesh
from gpt import FREE, PINNED, batch, clip_plain, gpt_settings, mesh_model, plain_model, steps, training_step
from measuring import OURS, PLAIN, console, fake_world, interleaved, line, options, ratio_line, report, times_table
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwise as sw
from shardwise import Replicate
from shardwise.comm.events import observe
from shardwise.kernel.dispatcher import drop_plans

LEARNED, FREE_KIND, PINNED_KIND = "learned", "free", "pinned"
LIMITS = {"fake": 1.6, "gloo": 1.25}
MOST_COLLECTIVES = 20
MOST_FIRST = 1.1
FIRST_STEPS = 7
SHOWN = (LEARNED, PINNED_KIND, FREE_KIND, PLAIN)


def learned_step(settings, mesh):
    """A step that has run five times while it was learned, and what was learned."""
    ids, targets = batch(settings)
    ours = [sw.distribute_tensor(t, mesh, [Replicate()] * mesh.ndim, src_data_rank=None) for t in (ids, targets)]
    step = training_step(mesh_model(settings, mesh, FREE), *ours, settings)
    learning = sw.learn()
    losses = [step() for _ in range(5)]
    learning.freeze()  # the steps of other models are not to be learned
    return step, learning, losses


def kinds(settings, mesh):
    """The steps by kind, and the learned one's figures."""
    recording = recording_ratio(settings, mesh)
    ids, targets = batch(settings)
    # Made before decisions are in force: parameters of the same names would follow them.
    runs = {
        FREE_KIND: steps(settings, mesh, FREE)[OURS],
        PINNED_KIND: steps(settings, mesh, PINNED)[OURS],
        PLAIN: _plain(settings, mesh, ids, targets),
    }
    step, learning, losses = learned_step(settings, mesh)
    runs = {LEARNED: step, **runs}
    figures = {
        "seconds to decide": learning.learned.seconds,
        "first step over one without recording": recording,
        "decisions": len(learning.learned.decisions),
        "collectives": {},
    }
    for kind in (LEARNED, FREE_KIND, PINNED_KIND):
        runs[kind]()
        figures["collectives"][kind] = _collectives(runs[kind])
    return runs, figures, losses


def _plain(settings, mesh, ids, targets):
    return training_step(plain_model(settings, mesh, FREE), ids, targets, settings, clip_plain)


def recording_ratio(settings, mesh):
    """A first step that is recorded over one that is not: medians of several, in turns, after one of each."""
    times = {False: [], True: []}
    for _ in range(1 + FIRST_STEPS):
        for is_recorded, of_kind in times.items():
            of_kind.append(_first_step(settings, mesh, is_recorded))
    with_it, without = (statistics.median(times[kind][1:]) for kind in (True, False))
    return with_it / without


def _first_step(settings, mesh, is_recorded):
    """Seconds of the first step of a new model, up to the optimizer's, where a recording ends."""
    ids, targets = batch(settings)
    ours = [sw.distribute_tensor(t, mesh, [Replicate()] * mesh.ndim, src_data_rank=None) for t in (ids, targets)]
    step = training_step(mesh_model(settings, mesh, FREE), *ours, settings)
    drop_plans()
    gc.collect()
    ends = []
    hook = register_optimizer_step_pre_hook(lambda *_: ends.append(time.perf_counter()))
    learning = sw.learn(is_recorded)
    start = time.perf_counter()
    step()
    hook.remove()
    learning.close()
    drop_plans()
    return ends[0] - start


def _collectives(run):
    sent = Counter()

    def saw(event):
        sent[event.kind] += 1

    with observe(saw):
        run()
    return dict(sent)


def fake_row(settings, rounds, calls):
    with fake_world(RANKS):
        runs, figures, _ = kinds(settings, tp_mesh())
        return {**interleaved(runs, rounds, calls), **figures}


def gloo_row(settings, rounds, calls):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_gloo_rank, (folder, settings, rounds, calls), nprocs=RANKS)
        return json.loads((Path(folder) / "row.json").read_text())


def _gloo_rank(rank, folder, settings, rounds, calls):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    runs, figures, losses = kinds(settings, tp_mesh())
    rest = iter(losses)
    check_losses({LEARNED: lambda: next(rest)}, settings)
    together = {kind: partial(_from_barrier_to_barrier, run) for kind, run in runs.items()}
    row = {**interleaved(together, rounds, calls), **figures}
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


MODES = {"fake": fake_row, "gloo": gloo_row}


def lines(mode, row):
    where = WHERE[mode]
    for kind, limit in ((LEARNED, LIMITS[mode]), (PINNED_KIND, None), (FREE_KIND, None)):
        work = f"GPT training step, 4 layers, tensor-parallel 4, {where}, over plain ({kind})"
        if limit is None:
            yield line(work, "-", f"{row[kind] / row[PLAIN]:.2f}x plain", met=None)
        else:
            yield ratio_line(work, row[kind] / row[PLAIN], limit, of="x plain")
    count = sum(row["collectives"][LEARNED].values())
    free = sum(row["collectives"][FREE_KIND].values())
    yield line(
        f"its collectives a step, learned ({free} without), {where}",
        f"≤ {MOST_COLLECTIVES}",
        str(count),
        met=count <= MOST_COLLECTIVES,
    )
    ratio = row["first step over one without recording"]
    yield ratio_line(f"first step while it is recorded, over one that is not, {where}", ratio, MOST_FIRST, dtensor="-")


@click.command()
@options(calls=3)
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), default=tuple(MODES), show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--context", default=64, show_default=True)
@click.option("--batch", "sequences", default=4, show_default=True)
def main(rounds, calls, json_file, modes, layers, width, context, sequences):
    """Print a table of medians and ratios."""
    settings = gpt_settings(width, context, sequences, layers)
    rows, figures = [], []
    for mode in modes:
        row = MODES[mode](settings, rounds, calls)
        figures += lines(mode, row)
        rows.append({"mode": mode, **row})
        console().print(times_table("GPT training step, learned", rows[-1:], ("mode",), SHOWN))
        for name in ("collectives", "decisions", "seconds to decide", "first step over one without recording"):
            console().print(f"{name}: {row[name]}", markup=False)
    report(rows, figures, json_file, settings=settings.as_json())


if __name__ == "__main__":
    main()
