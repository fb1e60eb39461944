"""Sweep over PyTorch's operator database: each sample in many placements, beside one device.

``python tests/sweep/run.py [--only REGEX] [--library NAME]... [--mesh 4]... [--direction backward]...``, or
``nox -s sweep``. An operator passes when every case does; its outcome is else the worst of its cases.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path

import click
from attrs import asdict, evolve, frozen
from database import DIRECTIONS, entries, has
from page import write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from trial import ORDER, Trial, check

from shardwise.errors import WorkerError
from shardwise.testing import WorkerPool

WAITS = 30.0, 240.0
"""Seconds for all cases of one operator, and for a second try: ranks that wait for each other never end by themselves,
but on a busy machine an operator may only be slow."""


@frozen
class Line:
    """What became of one operator: the outcome, the numbers of cases, and the first case that is not a pass."""

    name: str
    family: str
    library: str
    mesh: str
    direction: str
    outcome: str
    cases: int
    passed: int
    example: str


def tried(pool, trial, waits):
    """Every case of an operator on all ranks; one in their place if no try ends in its time."""
    for wait in waits:
        try:
            return pool.run(check, trial, timeout=wait)[0]
        except WorkerError as error:
            pool.close()
            # Ranks that raise have ended by an error of their card.
            what = "crash" if "the device stopped" in str(error) else "hang"
            ended = [(what, -1, "", " ".join(str(error).split())[:300])]
    return ended


def measure(pool, entry, trial, waits=WAITS):
    """Run every case of an operator on all ranks."""
    answer = tried(pool, trial, waits)
    where = (entry.name, entry.family, trial.library, "x".join(map(str, trial.shape)), trial.direction)
    if not answer:
        return Line(*where, "no sample", 0, 0, "")
    worst = min(answer, key=lambda case: ORDER.index(case[0]))
    passed = sum(case[0] == "pass" for case in answer)
    example = "" if worst[0] == "pass" else f"sample {worst[1]}, {worst[2]}: {worst[3]}"
    return Line(*where, worst[0], len(answer), passed, example)


def totals(lines, by):
    """Outcomes counted by a key of the lines."""
    found = collections.defaultdict(collections.Counter)
    for line in lines:
        if line.outcome != "no sample":
            found[by(line)][line.outcome] += 1
    return found


def show(lines, console):
    """Tables of the totals, in all and by family."""
    for title, by in (("In all", lambda _: ""), ("By family", lambda line: line.family)):
        table = Table(title=title)
        for column in ("family", "mesh", "direction", "library"):
            table.add_column(column)
        for column in ("ops", "pass", "", *ORDER[:-1]):
            table.add_column(column, justify="right")
        counts = totals(lines, lambda x, by=by: (by(x), x.mesh, x.direction, x.library))
        for key, counted in sorted(counts.items()):
            every = counted.total()
            share = f"{100 * counted['pass'] / every:.1f} %"
            table.add_row(*key, str(every), str(counted["pass"]), share, *(str(counted[o] or "") for o in ORDER[:-1]))
        console.print(table)


def work(only, family, libraries, meshes, directions, base):
    """The operators with what is to be tried of each, in the order of the tables."""
    chosen = [e for e in entries(only) if re.search(family, e.family)]
    return [
        (entry, evolve(base, name=entry.name, library=library, shape=tuple(map(int, shape.split("x"))), direction=d))
        for library in libraries
        for shape in meshes
        for d in directions
        for entry in chosen
        if has(entry.record, d)
    ]


@click.command()
@click.option("--only", default="", help="A regular expression; operators whose name it finds.")
@click.option("--family", default="", help="A regular expression; operators whose family it finds.")
@click.option("--library", "libraries", multiple=True, default=("shardwise",), show_default=True)
@click.option("--mesh", "meshes", multiple=True, default=("4", "2x2"), show_default=True)
@click.option("--direction", "directions", multiple=True, type=click.Choice(DIRECTIONS), default=DIRECTIONS[:2])
@click.option("--samples", default=8, show_default=True, help="The most samples of an operator.")
@click.option("--draws", default=3, show_default=True, help="Drawn placements per sample.")
@click.option("--partial", "partials", is_flag=True, help="Let drawn placements hold partial sums.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--slice", "part", default="0/1", show_default=True, help="I/N: each N-th operator, from the I-th on.")
@click.option("--seed", default="0", show_default=True)
@click.option("--page", type=click.Path(path_type=Path, exists=True), help="Write the tables into a page of the docs.")
@click.option("--from", "sources", multiple=True, type=click.Path(path_type=Path), help="Add the lines of such a file.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write every operator's line there.")
def main(
    only, family, libraries, meshes, directions, samples, draws, partials, device, part, seed, path, page, sources
):
    """Run the sweep, list what does not pass, and print the totals."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    base = Trial("", "", (), "", samples, draws, seed, partials, device)
    lines = [Line(**line) for source in sources for line in json.loads(source.read_text())]
    with WorkerPool(4) as pool:
        first, every = map(int, part.split("/"))
        planned = work(only, family, libraries, meshes, directions, base)[first::every]
        for entry, trial in track(planned, "operators", console=Console(stderr=True)):
            line = measure(pool, entry, trial)
            lines.append(line)
            if line.outcome not in ("pass", "no sample"):
                where = f"{line.library} {line.mesh} {line.direction} {line.name}"
                click.echo(f"{where}: {line.outcome} {line.passed}/{line.cases}; {line.example}")
            if path:
                path.write_text(json.dumps([asdict(x) for x in lines], indent=1))
    show(lines, console)
    if page:
        write(page, lines)


if __name__ == "__main__":
    main()
