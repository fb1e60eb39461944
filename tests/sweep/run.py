"""Sweep over PyTorch's operator database: each sample in many placements, beside one device.

``python tests/sweep/run.py [--only REGEX] [--library NAME]... [--mesh 4]... [--backward] [--json FILE]``, or
``nox -s sweep``. An operator passes when every case does; its outcome is else the worst of its cases.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import click
from attrs import asdict, frozen
from database import entries
from rich.console import Console
from rich.progress import track
from rich.table import Table
from trial import ORDER, check

from shardwise.errors import WorkerError
from shardwise.testing import WorkerPool

TIMEOUT = 240.0
"""Seconds for all cases of one operator; ranks that wait for each other never end by themselves."""


@frozen
class Line:
    """What became of one operator: the outcome, the numbers of cases, and the first case that is not a pass."""

    name: str
    family: str
    library: str
    mesh: str
    backward: bool
    outcome: str
    cases: int
    passed: int
    example: str


def measure(pool, entry, library, shape, *, backward, limit, draws, seed):
    try:
        found = pool.run(_check, entry.name, library, shape, backward, limit, draws, seed, timeout=TIMEOUT)[0]
    except WorkerError as error:
        pool.close()
        found = [("hang", -1, "", " ".join(str(error).split())[:300])]
    mesh_name = "x".join(map(str, shape))
    if not found:
        return Line(entry.name, entry.family, library, mesh_name, backward, "no sample", 0, 0, "")
    worst = min(found, key=lambda case: ORDER.index(case[0]))
    passed = sum(case[0] == "pass" for case in found)
    example = "" if worst[0] == "pass" else f"sample {worst[1]}, {worst[2]}: {worst[3]}"
    return Line(entry.name, entry.family, library, mesh_name, backward, worst[0], len(found), passed, example)


def _check(name, library, shape, backward, limit, draws, seed):
    return check(name, library, shape, backward=backward, limit=limit, draws=draws, seed=seed)


def totals(lines, by):
    """Outcomes counted by a key of the lines."""
    found = collections.defaultdict(collections.Counter)
    for line in lines:
        if line.outcome != "no sample":
            found[by(line)][line.outcome] += 1
    return found


def show(lines, console):
    for title, by in (("In all", lambda x: ""), ("By family", lambda x: x.family)):
        table = Table(title=title)
        for column in ("library", "mesh", "direction", "family", "ops", "pass", *ORDER[:-1]):
            table.add_column(
                column, justify="left" if column in ("library", "mesh", "family", "direction") else "right"
            )
        counts = totals(lines, lambda x, by=by: (by(x), x.library, x.mesh, x.backward))
        for (family, library, mesh_name, backward), counted in sorted(counts.items()):
            every = sum(counted.values())
            share = f"{counted['pass']} ({100 * counted['pass'] / every:.1f} %)"
            direction = "with backward" if backward else "forward"
            rest = [str(counted[o] or "") for o in ORDER[:-1]]
            table.add_row(library, mesh_name, direction, family, str(every), share, *rest)
        console.print(table)


@click.command()
@click.option("--only", default="", help="A regular expression; operators whose name it finds.")
@click.option("--family", default="", help="A regular expression; operators whose family it finds.")
@click.option("--library", "libraries", multiple=True, default=("shardwise",), show_default=True)
@click.option("--mesh", "meshes", multiple=True, default=("4", "2x2"), show_default=True)
@click.option("--forward/--no-forward", default=True, show_default=True)
@click.option("--backward/--no-backward", default=True, show_default=True)
@click.option("--samples", default=8, show_default=True, help="The most samples of an operator.")
@click.option("--draws", default=3, show_default=True, help="Drawn placements per sample.")
@click.option("--seed", default="0", show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write every operator's line there.")
@click.option("--list/--no-list", "listed", default=True, show_default=True, help="List what does not pass.")
def main(only, family, libraries, meshes, forward, backward, samples, draws, seed, path, listed):
    """Run the sweep and print its totals."""
    import re

    chosen = [e for e in entries(only) if re.search(family, e.family)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    lines = []
    directions = [d for d, wanted in ((False, forward), (True, backward)) if wanted]
    work = [(e, lib, m, d) for lib in libraries for m in meshes for d in directions for e in chosen]
    with WorkerPool(4) as pool:
        for entry, library, mesh_name, direction in track(work, "operators", console=Console(stderr=True)):
            if direction and not entry.record.supports_autograd:
                continue
            shape = tuple(int(n) for n in mesh_name.split("x"))
            line = measure(pool, entry, library, shape, backward=direction, limit=samples, draws=draws, seed=seed)
            lines.append(line)
            if listed and line.outcome not in ("pass", "no sample"):
                where = f"{line.library} {line.mesh} {'backward' if direction else 'forward'}"
                console.print(
                    f"{where} {line.name}: {line.outcome} {line.passed}/{line.cases}; {line.example}", markup=False
                )
            if path:
                path.write_text(json.dumps([asdict(x) for x in lines], indent=1))
    show(lines, console)


if __name__ == "__main__":
    main()
