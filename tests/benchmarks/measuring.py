"""What the benchmarks share: fake worlds, interleaved rounds, tables, and the lines that docs/performance.md shows.

Every script measures its kinds (shardwise, DTensor, plain local work) in one process. Each round measures all of them,
one after the other, and the figures are medians over the rounds: a busy machine slows all kinds. Python's collector
runs before each timed stretch and is off inside it: otherwise it would be charged to whichever kind happens to trip it.
What the imports made is frozen out of it, or each run would walk all of torch.
"""

import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

OURS, DTENSOR, PLAIN = KINDS = ("shardwise", "DTensor", "plain")

WIDTH = 140
"""Columns of a table that goes to a file or a pipe."""


# -- worlds and clocks -------------------------------------------------------------------------------------------


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` ranks that sends nothing; this process is rank 0. Torch gets one thread."""
    torch.set_num_threads(1)
    settle()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def settle() -> None:
    """Take what is there, such as what imports made, out of the collector's sight: walking it empties the caches."""
    gc.collect()
    gc.freeze()


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call of one timed stretch, with the collector run before it and off inside."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds per call of each kind: in each round every kind runs once, ``calls`` times; warmed up before."""
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(rounds):
        for kind, run in runs.items():
            times[kind].append(seconds(run, calls))
    return {kind: statistics.median(measured) for kind, measured in times.items()}


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


# -- results -----------------------------------------------------------------------------------------------------


def line(work: str, target: str, ours: str, *, met: bool | None, dtensor: str = "-") -> dict[str, object]:
    """One line of the table in docs/performance.md; ``met`` is None where there was nothing to measure."""
    return {"work": work, "DTensor": dtensor, "target": target, "ours": ours, "met": met}


def ratio_line(work: str, value: float, limit: float, *, dtensor: str = "1", of: str = "") -> dict[str, object]:
    """A line whose target is ``value <= limit``; ``of`` names what the ratio is of when it is not of DTensor."""
    return line(work, f"≤ {limit:g}{of}", f"{value:.2f}{of}", met=value <= limit, dtensor=dtensor)


def machine() -> dict[str, object]:
    """What the figures depend on besides the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    names = [entry.partition(":")[2].strip() for entry in text.splitlines() if entry.startswith("model name")]
    return names[0] if names else "unknown"


def report(rows: Sequence[Mapping], lines: Sequence[Mapping], json_file: str | None, **more: object) -> None:
    """Print the lines and, when asked, write everything to ``json_file``."""
    console().print(lines_table(lines))
    if json_file:
        script = Path(sys.argv[0]).name
        figures = {
            "benchmark": script,
            "options": sys.argv[1:],
            "machine": machine(),
            "rows": rows,
            "lines": lines,
            **more,
        }
        Path(json_file).write_text(json.dumps(figures, indent=1) + "\n")


def lines_table(lines: Sequence[Mapping]) -> Table:
    table = Table("work", DTENSOR, "target", "ours", "", title=f"against the targets, torch {torch.__version__}")
    marks = {True: "[green]met", False: "[red]short", None: "-"}
    for line in lines:
        table.add_row(line["work"], line[DTENSOR], line["target"], line["ours"], marks[line["met"]])
    return table


def times_table(title: str, rows: Sequence[Mapping], heads: Sequence[str], kinds: Sequence[str] = KINDS) -> Table:
    """Rows of medians in microseconds, with the ratios of shardwise to DTensor and to plain."""
    table = Table(*heads, title=f"{title}: microseconds, torch {torch.__version__}")
    for kind in (*kinds, "of DTensor", "of plain"):
        table.add_column(kind, justify="right")
    for row in rows:
        others = (row.get(other) if OURS in row else None for other in (DTENSOR, PLAIN))
        ratios = (f"{row[OURS] / other:.2f}" if other else "-" for other in others)
        shown = (f"{row[kind] * 1e6:,.1f}" if row.get(kind) else "-" for kind in kinds)
        table.add_row(*(str(row[head]) for head in heads), *shown, *ratios)
    return table


def console() -> Console:
    """The terminal, or wide enough for a table where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


# -- options -----------------------------------------------------------------------------------------------------


def options(rounds: int = 7, calls: int = 1) -> Callable:
    """``--rounds``, ``--calls`` and ``--json``: the same in every script."""

    def decorate(command: Callable) -> Callable:
        for option in (
            click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Everything to a file too."),
            click.option("--calls", default=calls, show_default=True, help="Calls in each timed stretch."),
            click.option("--rounds", default=rounds, show_default=True, help="Rounds that the medians are over."),
        ):
            command = option(command)
        return command

    return decorate
