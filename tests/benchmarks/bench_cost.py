"""The cost model against the clock: predicted and measured redistributions on four gloo ranks.

Run it with ``python tests/benchmarks/bench_cost.py [--rounds 5] [--json FILE]``. It calibrates each mesh, times every
transition (median of several turns in interleaved rounds, the slowest rank's), and gives Spearman's rank correlation of
predicted and measured times: over all, per mesh, and among the transitions of one size, where the size gives no hint.
"""

import math

import click
import torch
from measuring import line, report
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from shardwise.kernel.placements import parse_placement
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.testing import WorkerPool, mesh
from shardwise.tools.calibrate import calibrate, time_redistributions

RHO = 0.9
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
# Source and target per mesh dim. A shard that becomes partial is left out: its cost stands for the gather that it puts
# off, and not for its own copy (docs/cost-model.md).
PAIRS = {
    (4,): (
        ("P(sum)", "R"),
        ("P(max)", "R"),
        ("P(sum)", "S(0)"),
        ("P(sum)", "S(1)"),
        ("S(0)", "R"),
        ("S(1)", "R"),
        ("S(0)", "S(1)"),
        ("S(1)", "S(0)"),
        ("R", "S(0)"),
        ("R", "S(1)"),
        ("R", "P(avg)"),
    ),
    (2, 2): (
        ("P(sum) P(sum)", "R R"),
        ("P(sum) R", "R R"),
        ("R P(sum)", "R S(0)"),
        ("P(sum) P(sum)", "S(0) S(0)"),
        ("P(sum) S(0)", "S(1) S(0)"),
        ("S(0) S(0)", "R R"),
        ("S(0) S(1)", "R R"),
        ("S(0) R", "R R"),
        ("R S(1)", "R R"),
        ("S(0) S(0)", "S(1) S(1)"),
        ("S(0) S(1)", "S(1) S(0)"),
        ("S(0) R", "S(1) R"),
        ("R S(1)", "S(0) S(1)"),
        ("R R", "S(0) S(1)"),
        ("S(0) P(sum)", "R R"),
    ),
}


def cases(shape):
    """Per size an even tensor and, for every other pair, one that divides by nothing."""
    for nbytes in SIZES:
        side = math.isqrt(nbytes // 4)
        for i, (src, dst) in enumerate(PAIRS[shape]):
            yield nbytes, (side, side), src, dst
            if i % 2 == 0:
                yield nbytes, (side + 1, side - 1), src, dst


def on_rank(shape, rounds):
    """Calibrate and try every case; rank 0's rows are everyone's."""
    device_mesh = mesh(shape)
    calibrate(device_mesh, save=False)
    pairs = []
    for _, size, *both in cases(shape):
        meta = TensorMeta.contiguous(size, torch.float32)
        pairs.append([TensorSpec(device_mesh, [parse_placement(w) for w in words.split()], meta) for words in both])
    trials = time_redistributions(device_mesh, pairs, rounds)
    return [
        {
            "mesh": "x".join(map(str, shape)),
            "bytes": nbytes,
            "shape": list(size),
            "from": src,
            "to": dst,
            "steps": [f"{step.kind}{list(step.mesh_dims)}" for step in trial.planned.steps],
            "predicted": trial.predicted,
            "measured": trial.seconds,
        }
        for (nbytes, size, src, dst), trial in zip(cases(shape), trials, strict=True)
    ]


def rho(rows):
    """Spearman's rank correlation."""
    return float(spearmanr([r["predicted"] for r in rows], [r["measured"] for r in rows]).statistic)


def summary(rows):
    """The correlations, and the median of how far off a prediction is, as a factor."""
    correlations = {"all": rho(rows), "communicating": rho([r for r in rows if is_communicating(r)])}
    for key in ("mesh", "bytes"):
        for value in dict.fromkeys(r[key] for r in rows):
            correlations[f"{key} {value}"] = rho([r for r in rows if r[key] == value])
    off = sorted(max(r["predicted"] / r["measured"], r["measured"] / r["predicted"]) for r in rows)
    return {"transitions": len(rows), "rho": correlations, "median factor off": off[len(off) // 2]}


def is_communicating(row):
    return any(not step.startswith(("slice", "fill")) for step in row["steps"])


def show(rows, found):
    table = Table("mesh", "tensor", "from", "to", "steps", title=f"Redistribution on gloo, torch {torch.__version__}")
    for heading in ("predicted us", "measured us", "ratio"):
        table.add_column(heading, justify="right")
    for r in rows:
        text = (r["mesh"], f"f32{r['shape']}", r["from"], r["to"], "; ".join(r["steps"]))
        times = (f"{r['predicted'] * 1e6:,.0f}", f"{r['measured'] * 1e6:,.0f}", f"{r['predicted'] / r['measured']:.2f}")
        table.add_row(*(word.replace("[", r"\[") for word in text), *times)
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    console.print(table)
    for name, value in found["rho"].items():
        console.print(f"Spearman's rho, {name}: {value:.3f}", highlight=False)
    console.print(f"{found['transitions']} transitions, median factor off {found['median factor off']:.2f}")


def lines(found):
    """The lines of docs/performance.md."""
    rho = found["rho"]["all"]
    work = f"order of predicted and measured times, {found['transitions']} redistributions on four gloo ranks"
    return [line(work, "Spearman's rho ≥ 0.9", f"{rho:.3f}", met=rho >= RHO)]


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
def main(rounds, json_file):
    """Print a table of predicted and measured times, and how well their orders agree."""
    with WorkerPool(4) as pool:
        rows = [row for shape in PAIRS for row in pool.run(on_rank, shape, rounds, timeout=None)[0]]
    figures = summary(rows)
    show(rows, figures)
    report(rows, lines(figures), json_file, **figures)


if __name__ == "__main__":
    main()
