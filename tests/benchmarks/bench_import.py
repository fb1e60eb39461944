"""``from shardwise import MeshTensor`` on top of ``torch.distributed.tensor``, each time in a fresh process.

Run it with ``python tests/benchmarks/bench_import.py [--rounds 9] [--json FILE]``. shardwise shares torch's placement
classes, so a program that uses it pays for ``torch.distributed.tensor`` anyway; what is measured is what comes on top.
``import shardwise`` alone loads nothing, so a name is asked for, which loads all that a program on a mesh runs through.
Byte code is there before the first measurement, as it is after ``pip install``; the second line is without, where
Python compiles every module of a checkout anew. The list says which modules cost most, by their own time.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from measuring import console, line, options, report
from rich.table import Table

LIMIT = 0.1
SHOWN = 15

BASE, OURS = "import torch.distributed.tensor", "from shardwise import MeshTensor"
TIMED = f"""
import time
start = time.perf_counter()
{BASE}
between = time.perf_counter()
{OURS}
end = time.perf_counter()
import sys
plugins = sorted(n for n in sys.modules if n.startswith("shardwise_"))
print(between - start, end - between, *plugins)
"""
ENTRY = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s*(\S+)")


def fresh(cache, *arguments):
    """What a fresh Python says on its two outputs; ``cache`` is its folder of byte code, None for none."""
    # A checkout may have byte code beside its modules: that of a folder that is not there is none.
    settings = {"PYTHONPYCACHEPREFIX": cache or str(Path(tempfile.gettempdir()) / "no-byte-code")}
    settings |= {} if cache else {"PYTHONDONTWRITEBYTECODE": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**kept, **settings})
    return done.stdout, done.stderr


def medians(cache, rounds):
    """Median seconds of torch.distributed.tensor and of shardwise on top of it, and the plugins that came along."""
    fresh(cache, "-c", TIMED)
    runs = [fresh(cache, "-c", TIMED)[0].split() for _ in range(rounds)]
    base, ours = (statistics.median(float(answer[at]) for answer in runs) for at in (0, 1))
    return base, ours, sorted({name for answer in runs for name in answer[2:]})


def modules(cache):
    """Own microseconds of each module that the import adds to ``torch.distributed.tensor``."""
    _, text = fresh(cache, "-X", "importtime", "-c", f"{BASE}; {OURS}")
    entries = [(m[3], int(m[1])) for m in map(ENTRY.match, text.splitlines()) if m]
    after = [name for name, _ in entries].index("torch.distributed.tensor") + 1
    return sorted(entries[after:], key=lambda entry: -entry[1])


@click.command()
@options(rounds=9)
def main(rounds, calls, json_file):
    """Print the medians and the most expensive modules."""
    with tempfile.TemporaryDirectory() as cache:
        base, ours, plugins = medians(cache, rounds)
        slowest = modules(cache)
    _, uncached, _ = medians(None, rounds)
    table = Table("module", "own ms", title=f"most expensive of {len(slowest)} modules that the import adds")
    for name, micros in slowest[:SHOWN]:
        table.add_row(name, f"{micros / 1e3:.1f}")
    console().print(table)
    imported = f"plugins imported: {', '.join(plugins)}" if plugins else "no plugin imported"
    work = "`from shardwise import MeshTensor` on top of `torch.distributed.tensor`"
    lines = [
        line(
            work,
            f"≤ {LIMIT} s, no plugin imported",
            f"{ours:.3f} s, {imported}",
            met=ours <= LIMIT and not plugins,
            dtensor=f"{base:.2f} s itself",
        ),
        line("- without byte code", "-", f"{uncached:.3f} s", met=None),
    ]
    rows = [{"module": name, "own microseconds": micros} for name, micros in slowest]
    report(
        rows,
        lines,
        json_file,
        seconds={"torch.distributed.tensor": base, "shardwise": ours, "without byte code": uncached},
    )


if __name__ == "__main__":
    main()
