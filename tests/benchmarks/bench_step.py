"""A GPT training step, tensor-parallel over four ranks: shardwise and DTensor beside the same program by hand.

Run it with ``python tests/benchmarks/bench_step.py [--mode fake --mode gloo --mode compile] [--rounds 7] [--calls 3]
[--json FILE]``. ``gpt.py`` holds the model, its two layouts and the program by hand. A step is forward, backward,
clipped norm and fused AdamW; before anything is timed the losses of three steps are compared with one device's (not
under the fake group, which adds nothing up). "fake" takes communication away, "gloo" runs four processes and times
rank 0 from barrier to barrier, "compile" runs forward and backward compiled by inductor, under the fake group.
"""

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from gpt import (
    FREE,
    PINNED,
    batch,
    dtensor_model,
    gpt_settings,
    loss_of,
    mesh_model,
    plain_model,
    steps,
    training_step,
    written_out,
)
from measuring import (
    DTENSOR,
    OURS,
    PLAIN,
    console,
    fake_world,
    interleaved,
    line,
    options,
    ratio_line,
    report,
    times_table,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import shardwise as sw

RANKS = 4
LIMITS = {"fake": 1.6, "gloo": 1.3, "compile": 1.1}
WHERE = {
    "fake": "fake process group",
    "gloo": "four gloo processes, wall clock",
    "compile": "torch.compile, forward and backward, fake process group",
}


def tp_mesh():
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


# -- without communication ---------------------------------------------------------------------------------------


def fake_rows(settings, layouts, rounds, calls):
    with fake_world(RANKS):
        mesh = tp_mesh()
        return [{"layout": layout, **interleaved(steps(settings, mesh, layout), rounds, calls)} for layout in layouts]


# -- four processes ----------------------------------------------------------------------------------------------


def gloo_rows(settings, layouts, rounds, calls):
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, settings, layouts, rounds, calls)
        torch.multiprocessing.spawn(_gloo_rank, arguments, nprocs=RANKS)
        return json.loads((Path(folder) / "rows.json").read_text())


def _gloo_rank(rank, folder, settings, layouts, rounds, calls):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = tp_mesh()
    rows = []
    for layout in layouts:
        runs = steps(settings, mesh, layout)
        check_losses(runs, settings)
        together = {kind: partial(_from_barrier_to_barrier, run) for kind, run in runs.items()}
        rows.append({"layout": layout, **interleaved(together, rounds, calls)})
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _from_barrier_to_barrier(run):
    run()
    dist.barrier()


def check_losses(runs, settings):
    """Three steps of every kind give one device's losses."""
    single = written_out(settings)
    reference = training_step(single, *batch(settings), settings)
    expected = [reference() for _ in range(3)]
    for kind, run in runs.items():
        wholes = [_whole(run()) for _ in range(3)]
        assert_close(wholes, expected, rtol=1e-4, atol=1e-4, msg=lambda text, kind=kind: f"{kind}: {text}")


def _whole(loss):
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


# -- compiled ----------------------------------------------------------------------------------------------------


def compile_rows(settings, layouts, rounds, calls):
    """Forward and backward compiled; a kind that cannot be compiled has its error in place of a time."""
    with fake_world(RANKS):
        mesh = tp_mesh()
        return [{"layout": layout, **_compiled(settings, mesh, layout, rounds, calls)} for layout in layouts]


def _compiled(settings, mesh, layout, rounds, calls):
    models = {OURS: mesh_model, DTENSOR: dtensor_model, PLAIN: plain_model}
    inputs = operands(settings, mesh)
    runs, errors = {}, {}
    for kind, make in models.items():
        run = forward_backward(make(settings, mesh, layout), inputs[kind])
        start = time.perf_counter()
        try:
            run()
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises is the finding
            errors[kind] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            console().print(f"{kind} cannot be compiled: {errors[kind]}", markup=False)
        else:
            runs[kind] = run
            console().print(f"{kind} compiled in {time.perf_counter() - start:.0f} s")
    return {**interleaved(runs, rounds, calls), "errors": errors}


def operands(settings, mesh):
    """The batch for each kind, whole on every rank."""
    ids, targets = batch(settings)
    ours = [sw.distribute_tensor(t, mesh, None, src_data_rank=None) for t in (ids, targets)]
    return {OURS: ours, DTENSOR: [t.to_dtensor() for t in ours], PLAIN: [ids, targets]}


def forward_backward(model, inputs):
    """A function that runs forward and backward, compiled at its first call."""
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=False)

    def run():
        model.zero_grad()
        compiled(model, *inputs).backward()

    return run


# -- results -----------------------------------------------------------------------------------------------------


def lines(mode, rows):
    for row in rows:
        work = f"GPT training step, 4 layers, tensor-parallel 4, {WHERE[mode]}, over plain ({row['layout']} layout)"
        dtensor = f"{row[DTENSOR] / row[PLAIN]:.2f}x plain" if DTENSOR in row and PLAIN in row else "-"
        if OURS in row and PLAIN in row:
            yield ratio_line(work, row[OURS] / row[PLAIN], LIMITS[mode], dtensor=dtensor, of="x plain")
        else:
            reason = row.get("errors", {})
            missing = OURS if OURS in reason else PLAIN
            yield line(work, f"≤ {LIMITS[mode]}x plain", f"{missing}: {reason[missing]}", met=None, dtensor=dtensor)


MODES = {"fake": fake_rows, "gloo": gloo_rows, "compile": compile_rows}


@click.command()
@options(calls=3)
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), default=tuple(MODES), show_default=True)
@click.option("--layout", "layouts", multiple=True, type=click.Choice([PINNED, FREE]), default=(PINNED, FREE))
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--context", default=64, show_default=True)
@click.option("--batch", "sequences", default=4, show_default=True)
def main(rounds, calls, json_file, modes, layouts, layers, width, context, sequences):
    """Print a table of medians and ratios."""
    settings = gpt_settings(width, context, sequences, layers)
    rows, figures = [], []
    for mode in modes:
        # Compilation takes minutes; the layouts do not differ in what the compiler leaves to run-time.
        part = MODES[mode](settings, layouts[:1] if mode == "compile" else layouts, rounds, calls)
        figures += lines(mode, part)
        rows += [{"mode": mode, **row} for row in part]
        console().print(times_table("GPT training step", rows[-len(part) :], ("mode", "layout")))
    report(rows, figures, json_file, settings=settings.as_json())


if __name__ == "__main__":
    main()
