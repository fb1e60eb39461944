"""What it takes to compile the GPT of ``bench_step``, forward and backward: shardwise and DTensor beside plain.

Run it with ``python tests/benchmarks/bench_compile.py [--rounds 3] [--json FILE]``. Each kind is compiled by inductor
in a process of its own, twice: with empty caches, and with the caches that the first process left. A figure is the CPU
time of the process and of the compilers that it starts, from the first call of the step to its end; a small function
was compiled before. "kernels" are the calls of kernels that inductor does not write itself, such as products: a graph
that differs from that of the program by hand in collectives alone has as many.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch
from bench_step import RANKS, forward_backward, operands, tp_mesh
from gpt import PINNED, dtensor_model, gpt_settings, mesh_model, plain_model
from measuring import DTENSOR, KINDS, OURS, PLAIN, console, fake_world, line, options, report
from rich.table import Table
from torch._dynamo.utils import counters

MODELS = {OURS: mesh_model, DTENSOR: dtensor_model, PLAIN: plain_model}
CACHES = ("empty", "full")
LIMIT = 1.3


def cpu_seconds():
    """Of this process and of the children that have ended."""
    return sum(os.times()[:4])


def compiled_here(kind, size):
    """Compile in this process: the seconds that it takes, and the calls of kernels that were there before."""
    settings = gpt_settings(**size)
    with fake_world(RANKS):
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
        mesh = tp_mesh()
        run = forward_backward(MODELS[kind](settings, mesh, PINNED), operands(settings, mesh)[kind])
        counters.clear()
        start = cpu_seconds()
        run()
        return {"seconds": cpu_seconds() - start, "kernels": counters["inductor"]["extern_calls"]}


def compiled(kind, size, cache):
    """:func:`compiled_here` in a new process, with the caches of a folder."""
    command = [sys.executable, __file__, "--child", json.dumps([kind, size])]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{kind} cannot be compiled:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(size, rounds):
    """By kind and state of the caches: the median of the seconds, and the number of kernels."""
    found = {(kind, caches): [] for kind in KINDS for caches in CACHES}
    for _ in range(rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                for caches in CACHES:
                    found[kind, caches].append(compiled(kind, size, Path(folder)))
    return [
        {
            "kind": kind,
            "caches": caches,
            "seconds": statistics.median(each["seconds"] for each in all_of_them),
            "kernels": all_of_them[0]["kernels"],
        }
        for (kind, caches), all_of_them in found.items()
    ]


def lines(rows):
    seconds = {(row["kind"], row["caches"]): row["seconds"] for row in rows}
    for caches in CACHES:
        ours, dtensor = (seconds[kind, caches] / seconds[PLAIN, caches] for kind in (OURS, DTENSOR))
        yield line(
            f"compiling the GPT, 4 layers, forward and backward, inductor, caches {caches}, CPU time over plain",
            f"≤ {LIMIT}x plain",
            f"{ours:.2f}x plain",
            met=ours <= LIMIT,
            dtensor=f"{dtensor:.2f}x plain",
        )


def table(rows):
    shown = Table("kind", "caches", title=f"compiling the GPT: CPU time, torch {torch.__version__}")
    for head in ("seconds", "kernels"):
        shown.add_column(head, justify="right")
    for row in rows:
        shown.add_row(row["kind"], row["caches"], f"{row['seconds']:.1f}", str(row["kernels"]))
    return shown


@click.command()
@options(rounds=3)
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--child", hidden=True, help="Compile this here, and print what it took.")
def main(rounds, calls, json_file, layers, width, child):
    """Print a table of medians and ratios."""
    if child:
        console().print_json(json.dumps(compiled_here(*json.loads(child))), indent=None)
        return
    size = {"layers": layers, "width": width}
    rows = measure(size, rounds)
    console().print(table(rows))
    report(rows, [*lines(rows)], json_file)


if __name__ == "__main__":
    main()
