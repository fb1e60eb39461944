"""On the cards of this machine, one rank each over NCCL: shardwise beside DTensor and the same program by hand.

Run it with ``python tests/benchmarks/bench_card.py [--part NAME]... [--rounds 7] [--calls 5] [--json FILE]``, or
``nox -s gpu``, which writes the figures into docs/performance.md. With one card it is a world of one: what is sent
costs next to nothing, and what shows is the host's work beside that of the card. Each timed stretch ends when the
device has done all of it.

"ops" are the cases of ``bench_dispatch.py``; "step" is the GPT training step of ``bench_step.py``, at a size that keeps
a card busy, in bfloat16; "memory" is what such a step takes at its peak beyond what is held before it; "compile" is
its forward and backward pass, compiled; "graph" is the whole step captured as a CUDA graph. A part that fails leaves
its error in place of a figure, and the others run. ``--device cpu`` shows that the script works where there is no card:
gloo, and no graph.
"""

import json
import tempfile
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from bench_dispatch import CASES, operand_sets
from bench_step import forward_backward
from gpt import (
    PINNED,
    batch,
    clip,
    clip_plain,
    dtensor_model,
    loss_of,
    mesh_model,
    plain_model,
    training_step,
    written_out,
)
from measuring import (
    DTENSOR,
    KINDS,
    OURS,
    PLAIN,
    console,
    geometric_mean,
    interleaved,
    line,
    options,
    report,
    settle,
    times_table,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import shardwise as sw
from shardwise import Replicate
from shardwise.demo.settings import RunSettings

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
MODELS = {OURS: mesh_model, DTENSOR: dtensor_model, PLAIN: plain_model}
OPS_EACH = 40
"""Ops in a stretch for each step: enough that the wait at its end does not count."""
PATIENCE = timedelta(minutes=5)


# -- on every rank -----------------------------------------------------------------------------------------------


class Here:
    """This rank's device and mesh, and the model on it as each kind has it."""

    def __init__(self, settings, device, rounds, calls):
        self.settings, self.device, self.rounds, self.calls = settings, device, rounds, calls
        self.dtype = torch.bfloat16
        self.mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))

    def model(self, kind):
        with torch.device(self.device):
            return MODELS[kind](self.settings, self.mesh, PINNED).to(self.dtype)

    def inputs(self, kind):
        plain = [t.to(self.device) for t in batch(self.settings)]
        if kind == PLAIN:
            return plain
        ours = [sw.distribute_tensor(t, self.mesh, [Replicate()], src_data_rank=None) for t in plain]
        return ours if kind == OURS else [t.to_dtensor() for t in ours]

    def step(self, kind):
        clipping = clip_plain if kind == PLAIN else clip
        return training_step(self.model(kind), *self.inputs(kind), self.settings, clipping)

    def done(self):
        """Wait until the device has done what it was given."""
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def times(self, runs, times=1):
        """Seconds of each kind, over ``times`` as many calls as a stretch of steps has."""
        calls = self.calls * times

        def whole(run):
            for _ in range(calls):
                run()
            self.done()

        measured = interleaved({kind: partial(whole, run) for kind, run in runs.items()}, self.rounds, 1)
        return {kind: seconds / calls for kind, seconds in measured.items()}


def ops(here):
    """Each op alone: forward, with operands that want no gradient."""
    with torch.device(here.device):
        sets = operand_sets(here.mesh, requires_grad=False)
    for name, case in CASES.items():
        yield {"what": name, **here.times({kind: partial(case, sets[kind]) for kind in KINDS}, OPS_EACH)}


def step(here):
    """Forward, backward, clipped norm and fused AdamW, once the losses of three steps are those of one device."""
    runs = {kind: here.step(kind) for kind in KINDS}
    with torch.device(here.device):
        single = written_out(here.settings).to(here.dtype)
    reference = training_step(single, *here.inputs(PLAIN), here.settings)
    expected = [reference() for _ in range(3)]
    for kind, run in runs.items():
        losses = [_whole(run()) for _ in range(3)]
        assert_close(losses, expected, rtol=2e-2, atol=2e-2, msg=lambda text, kind=kind: f"{kind}: {text}")
    yield {"what": "a step", **here.times(runs)}


def _whole(loss):
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def memory(here):
    """Bytes, in place of seconds."""
    row = {"what": "a step"}
    for kind in KINDS:
        run = here.step(kind)
        run()
        here.done()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        here.done()
        row[kind] = torch.accelerator.max_memory_allocated() - before
    yield row


def compiled(here):
    runs, errors = {}, {}
    for kind in KINDS:
        run = forward_backward(here.model(kind), here.inputs(kind))
        try:
            run()
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises is the finding
            errors[kind] = _said(error)
        else:
            runs[kind] = run
    yield {"what": "forward and backward", **here.times(runs), "errors": errors}


def graph(here):
    """The step with an optimizer that can be captured, replayed."""
    runs, kept = {}, []  # a graph does not keep what it reads, and a capture frees what nobody keeps
    for kind in (OURS, PLAIN):
        model, inputs = here.model(kind), here.inputs(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=here.settings.learning_rate, fused=True, capturable=True)

        def once(model=model, inputs=inputs, optimizer=optimizer):
            loss_of(model, *inputs).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                once()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            once()
        runs[kind] = captured.replay
        kept.append(once)
    yield {"what": "a captured step", **here.times(runs)}


PARTS = {"ops": ops, "step": step, "memory": memory, "compile": compiled, "graph": graph}
ON_CARDS = "memory", "graph"


def _said(error):
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"


def run_rank(rank, folder, ranks, device, settings, parts, rounds, calls):
    """What one rank measures; the first writes it."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    settle()
    here = Here(settings, device, rounds, calls)
    rows = []
    for part in parts:
        try:
            rows += [{"part": part, **row} for row in PARTS[part](here)]
        except Exception as error:  # noqa: BLE001  # the next part may work: a card is not at hand every day
            traceback.print_exc()
            rows.append({"part": part, "what": "failed", "errors": {OURS: _said(error)}})
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# -- results -----------------------------------------------------------------------------------------------------


WORK = {
    "step": "GPT training step, {layers} layers of width {width}, bfloat16, over plain",
    "memory": "- its peak beyond what is held, over plain",
    "compile": "- forward and backward, torch.compile, over plain",
    "graph": "- captured as a CUDA graph, over plain",
}
OPS_LIMIT = 0.6
LIMITS = {"step": 1.1, "memory": 1.05, "compile": 1.1, "graph": 1.05}


def lines(rows, settings, ranks):
    """The lines of the page; a part that failed has its error."""
    where = "one card" if ranks == 1 else f"{ranks} cards"
    if timed := [row for row in rows if row["part"] == "ops" and OURS in row]:
        ours = geometric_mean([row[OURS] / row[DTENSOR] for row in timed])
        of_plain = geometric_mean([row[DTENSOR] / row[PLAIN] for row in timed])
        work = f"one op that ran before, geometric mean of {len(timed)}, {where}"
        yield line(work, f"≤ {OPS_LIMIT}", f"{ours:.2f}", met=ours <= OPS_LIMIT, dtensor=f"1 ({of_plain:.1f}x plain)")
    for row in rows:
        part = row["part"]
        if part in WORK:
            work = f"{WORK[part].format(layers=settings.layers, width=settings.width)}, {where}"
            yield _over_plain(work, row, LIMITS[part])
        elif OURS not in row:
            yield line(f"ops, {where}", "-", f"failed: {row['errors'][OURS]}", met=False)


def _over_plain(work, row, limit):
    limit_text = f"≤ {limit:g}x plain"
    dtensor = f"{row[DTENSOR] / row[PLAIN]:.2f}x plain" if row.get(DTENSOR) and row.get(PLAIN) else "-"
    if row.get(OURS) and row.get(PLAIN):
        ratio = row[OURS] / row[PLAIN]
        return line(work, limit_text, f"{ratio:.2f}x plain", met=ratio <= limit, dtensor=dtensor)
    errors = row.get("errors", {})
    kind = OURS if OURS in errors else PLAIN
    return line(work, limit_text, f"{kind} failed: {errors.get(kind, 'no figure')}", met=False, dtensor=dtensor)


@click.command()
@options(calls=5)
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), default=tuple(PARTS), show_default=True)
@click.option("--device", type=click.Choice(list(BACKENDS)), default="cuda", show_default=True)
@click.option("--ranks", type=click.IntRange(1), help="Cards; all that there are, unless it is said.")
@click.option("--layers", default=12, show_default=True)
@click.option("--width", default=768, show_default=True)
@click.option("--context", default=1024, show_default=True)
@click.option("--batch", "sequences", default=8, show_default=True)
def main(rounds, calls, json_file, parts, device, ranks, layers, width, context, sequences):
    """Print a table of medians and ratios."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("torch finds no CUDA device; --device cpu shows that the script works")
    ranks = ranks or (torch.cuda.device_count() if device == "cuda" else 1)
    chosen = [part for part in parts if device == "cuda" or part not in ON_CARDS]
    settings = RunSettings(
        mesh=(ranks,), layers=layers, width=width, heads=max(ranks, width // 64), context=context, batch=sequences
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, ranks, device, settings, chosen, rounds, calls)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    timed = [row for row in rows if row["part"] != "memory" and OURS in row]
    console().print(times_table("on cards" if device == "cuda" else "on a CPU", timed, ("part", "what")))
    cards = [torch.cuda.get_device_name(i) for i in range(ranks)] if device == "cuda" else []
    report(rows, list(lines(rows, settings, ranks)), json_file, cards=cards)


if __name__ == "__main__":
    main()
