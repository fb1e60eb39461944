"""The solvers of a whole step's plan: on graphs like a transformer's, and on the contest's public instances.

Run it with ``python tests/benchmarks/bench_solver.py [--rounds 3] [--most 20000] [--instances FOLDER [--only AGM]
[--seconds 60]] [--json FILE]``. The instances are those of github.com/google/iopddl, folder ``benchmarks``; with the
contest's table of results beside them as ``best.csv`` (github.com/asplos-contest/2025,
``misc/iopddl_final_results.csv``) the costs are compared with the least that any team reached. Seconds are of one core,
reading included.
"""

import math
import statistics
import time
from pathlib import Path

import click
import numpy as np
from contest import best_known, read
from contest_search import Search
from measuring import line, report
from rich.console import Console
from rich.table import Table

from shardwise.program.cost_graph import CostGraph
from shardwise.program.elimination import eliminate
from shardwise.program.elimination_order import elimination_order
from shardwise.program.network import Network

SIZES = (500, 1_000, 4_912, 10_000, 20_000)
STEP = 4_912  # variables of a 7-billion step
STEP_SECONDS = 1.0
WITHIN = 2.0
BLOCK = 24


def transformer(variables, seed=0):
    """Blocks of one structure in a chain: calls and resting tensors in turn, residual sums that skip six and twelve."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(4, 16, size=BLOCK)]
    unary = [rng.integers(0, 1_000_000, size=size) for size in sizes]
    tables = {}

    def pair(u, v):
        key = u % BLOCK, v % BLOCK
        if key not in tables:
            tables[key] = rng.integers(0, 1_000_000, size=(sizes[key[0]], sizes[key[1]]))
        return u, v, tables[key]

    pairs = [pair(v, v + 1) for v in range(variables - 1)]
    pairs += [pair(v, v + skip) for skip in (5, 12, 17) for v in range(0, variables - skip, 6)]
    pairs += [pair(v, v + 3) for v in range(1, variables - 3, 6)]
    return CostGraph([unary[v % BLOCK] for v in range(variables)], pairs)


def refuse(variable, entries, _):
    raise AssertionError(f"variable {variable} needs a table of {entries} entries")


def exact(variables, rounds):
    """Seconds of one core and the largest table of an elimination."""
    graph = transformer(variables)
    network = Network.of(graph)
    largest = elimination_order(network.sizes, network.neighbours, 30_000_000, refuse).largest
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        eliminate(graph)
        taken.append(time.process_time() - start)
    return {
        "variables": variables,
        "pairs": len(graph.pairs),
        "largest": largest,
        "seconds": statistics.median(taken),
    }


def contested(path, known, seconds):
    """What a search finds on one instance in the given seconds of one core."""
    start = time.process_time()
    instance = read(path)
    reading = time.process_time() - start
    search = Search(instance)
    search.run(lambda: time.process_time() - start >= seconds)
    best = known.get(path.name.split(".")[0].rpartition("-")[2])
    return {
        "name": instance.name,
        "nodes": len(instance.nodes.unary),
        "groups": len(instance.graph.unary),
        "edges": len(instance.nodes.pairs),
        "cost": search.cost,
        "best": best,
        "ratio": search.cost / best if search.cost is not None and best else None,
        "rounds": search.rounds,
        "reading": reading,
        "seconds": time.process_time() - start,
    }


def show(title, rows):
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "name" else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)


def _shown(value):
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def lines(chains, instances, seconds):
    """The lines of docs/performance.md."""
    result = [
        line(
            f"optimum of a graph like a 7-billion step's, {row['variables']:,} variables",
            f"≤ {STEP_SECONDS:g} s of one core",
            f"{row['seconds']:.2f} s",
            met=row["seconds"] <= STEP_SECONDS,
        )
        for row in chains
        if row["variables"] == STEP or (row is chains[-1] and row["variables"] < STEP)
    ]
    ratios = [row["ratio"] or math.inf for row in instances if row["best"]]
    if ratios:
        met = sum(ratio <= WITHIN for ratio in ratios)
        result.append(
            line(
                f"{len(ratios)} public instances of the intra-operator contest, {seconds:g} s of one core each",
                "all ≤ 2x the best known cost",
                f"{met} of {len(ratios)}, median {statistics.median(ratios):.2f}x",
                met=met == len(ratios),
            )
        )
    return result


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--most",
    type=click.IntRange(min=SIZES[0]),
    default=SIZES[-1],
    show_default=True,
    help="Variables of the largest synthetic graph.",
)
@click.option("--instances", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="Letters of instances.")
@click.option("--seconds", default=60.0, show_default=True, help="For each instance.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
def main(rounds, most, instances, only, seconds, json_file):
    """Print times and largest tables of exact solutions, and costs on public instances."""
    chains = [exact(variables, rounds) for variables in SIZES if variables <= most]
    show("Exact elimination", chains)
    found = []
    if instances:
        known = best_known(instances)
        paths = sorted([*instances.glob("*.json"), *instances.glob("*.json.gz")])
        for path in paths:
            if not only or path.name.split(".")[0].rpartition("-")[2] in only:
                found.append(contested(path, known, seconds))
                click.echo(f"{found[-1]}")
        show(f"Contest instances, {seconds:g} s", found)
    report([*chains, *found], lines(chains, found, seconds), json_file)


if __name__ == "__main__":
    main()
