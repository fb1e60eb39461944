"""What 50 installed plugins of 40 rules each cost at start, and a hit and a miss.

Run it with ``python tests/benchmarks/bench_growth.py [--rounds 9] [--calls 2000] [--json FILE]``. The plugins are real
distributions: a folder with modules, ``dist-info`` and entry points, found and loaded as any installed plugin is, each
with rules for 40 custom ops of its own. Fresh processes take turns, one without the folder on its path and one with
it, and each reports its own medians.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch
from measuring import console, fake_world, line, options, report, seconds
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.discovery.entry_points import discover
from shardwise.discovery.process import default_registry, statuses

PLUGINS, RULES = 50, 40
HIT_LIMIT, MISS_LIMIT = 1.05, 1.10
"""A hit must not change: 5 % is what two runs of the same process differ by. A miss may take 10 % more."""

MODULE = """
import torch
from shardwise.hookspecs import hookimpl
from shardwise.rule import rule

names = [f"op{{i}}" for i in range({rules})]
library = torch.library.Library("grown{number}", "DEF")
for name in names:
    library.define(f"{{name}}(Tensor x, Tensor y) -> Tensor")
ops = getattr(torch.ops, "grown{number}")
rules = [rule(getattr(ops, name).default, "..., ... -> ...", partial=["sum, sum -> sum"]) for name in names]


@hookimpl
def shardwise_register(registry):
    registry.add(*rules)
"""


def install(folder):
    """Write the plugins into ``folder`` as installed distributions."""
    for number in range(PLUGINS):
        (folder / f"grown{number}.py").write_text(MODULE.format(number=number, rules=RULES))
        info = folder / f"grown{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: grown{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[shardwise.plugins.v1]\ngrown{number} = grown{number}\n")


# -- in each process ---------------------------------------------------------------------------------------------


def figures(rounds, calls):
    """Median seconds of a hit and of a miss, of finding and loading, and how many rules there are."""
    find = seconds(discover)
    load = seconds(default_registry)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        hits, misses = _hits(mesh, rounds, calls), _misses(mesh, max(50, calls // 20))
    loaded = sum(status.status == "loaded" for status in statuses())
    return {
        "find": find,
        "load": load,
        "hit": hits,
        "miss": misses,
        "plugins": loaded,
        "rules": len(list(default_registry().ops())),
    }


def _placed(mesh, *shape):
    return sw.distribute_tensor(torch.ones(shape), mesh, [Shard(0), Replicate()], src_data_rank=None)


def _hits(mesh, rounds, calls):
    x, y = _placed(mesh, 8, 16), _placed(mesh, 8, 16)
    x + y
    return statistics.median(seconds(lambda: x + y, calls) for _ in range(rounds))


def _misses(mesh, count):
    sizes = itertools.count(8, 4)

    def miss():
        n = next(sizes)
        x, w = _placed(mesh, n, 16), sw.distribute_tensor(torch.ones(16, n), mesh, None, src_data_rank=None)
        return seconds(lambda: x @ w)

    for _ in range(10):
        miss()
    return statistics.median(miss() for _ in range(count))


# -- the two kinds of process in turns ---------------------------------------------------------------------------


def fresh(rounds, calls, folder=None):
    paths = [*([str(folder)] if folder else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, __file__, "--child", "--rounds", str(rounds), "--calls", str(calls)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@click.command()
@options(rounds=9, calls=2000)
@click.option("--child", is_flag=True, hidden=True)
def main(rounds, calls, json_file, child):
    """Print what the plugins cost."""
    if child:
        click.echo(json.dumps(figures(rounds, calls)))
        return
    seconds = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        install(Path(name))
        fresh(1, calls, name)  # compiles the byte code
        for _ in range(rounds):
            seconds["without"].append(fresh(rounds, calls))
            seconds["with"].append(fresh(rounds, calls, name))
    rows = [{"plugins installed": which, **_medians(answers)} for which, answers in seconds.items()]
    extra = rows[1]["plugins"] - rows[0]["plugins"]
    assert extra == PLUGINS, f"{extra} of the {PLUGINS} plugins were loaded"
    table = Table(*rows[0], title="with and without generated plugins (microseconds; finding and loading in ms)")
    for row in rows:
        table.add_row(row["plugins installed"], *(f"{value:,.1f}" for value in list(row.values())[1:]))
    console().print(table)
    report(rows, [*lines(rows)], json_file)


def _medians(answers):
    scale = {"hit": 1e6, "miss": 1e6, "find": 1e3, "load": 1e3, "plugins": 1, "rules": 1}
    return {name: statistics.median(a[name] for a in answers) * by for name, by in scale.items()}


def lines(rows):
    without, grown = rows
    for name, limit, target in (("hit", HIT_LIMIT, "unchanged"), ("miss", MISS_LIMIT, "at most +10 %")):
        ratio = grown[name] / without[name]
        work = f"{PLUGINS} plugins of {RULES} rules installed: a {name}"
        yield line(work, target, f"{(ratio - 1) * 100:+.0f} %", met=ratio <= limit)
    for name, what in (
        ("find", "finding all plugins, no import"),
        ("load", "loading all plugins, once (finds them too)"),
    ):
        yield line(f"- {what}", "-", f"{grown[name]:.0f} ms against {without[name]:.0f}", met=None)


if __name__ == "__main__":
    main()
