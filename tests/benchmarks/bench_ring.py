"""What it costs to record every collective, beside a collective that sends nothing and beside a training step.

Run it with ``python tests/benchmarks/bench_ring.py [--rounds 7] [--calls 20] [--layers 4] [--width 64] [--context 64]
[--json FILE]``. Under the fake process group nothing is sent, so a collective costs least and a record shows most. Each
record of a GPT's training step is timed where it happens, with the stacks and the changes of call site that a program
has, and beside it a record that does nothing, whose clock and call are as cold: the difference of the medians counts.
The smallest collective is timed with and without.
"""

import statistics
import time
from typing import ClassVar

import click
import torch
from gpt import FREE, gpt_settings, steps
from measuring import OURS, console, fake_world, interleaved, line, options, ratio_line, report, seconds, times_table
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Partial, Replicate
from shardwise.comm import groups
from shardwise.comm.collective_log import CollectiveLog

LIMIT_US, RATIO = 1.0, 1.05


class NoLog(CollectiveLog):
    """Records nothing."""

    def record(self, code, nbytes):
        """Nothing."""

    record_uneven = record


class TimedLog(CollectiveLog):
    """Notes the nanoseconds of each record, with those of the clock."""

    taken: ClassVar[list[int]] = []

    def record(self, code, nbytes):
        start = time.perf_counter_ns()
        super().record(code, nbytes)
        self.taken.append(time.perf_counter_ns() - start)


class TimedNoLog(NoLog):
    """The same around a record that does nothing: the clock and a call, cold as they are there."""

    taken: ClassVar[list[int]] = []

    def record(self, code, nbytes):
        start = time.perf_counter_ns()
        super().record(code, nbytes)
        self.taken.append(time.perf_counter_ns() - start)


def with_logs(log_class, run):
    """A run whose groups have new logs; groups keep theirs otherwise, so that nothing else is slower or faster."""
    logs = {}

    def call():
        for group in groups_of_world():
            group.log = logs.setdefault(id(group), log_class())
        return run()

    return call


def groups_of_world():
    return [group for group in groups._per_world.now().values() if group.size > 1]


def many_records(log):
    for _ in range(10_000):
        log.record(0x5EED, 4096)


def timed_records(run, rounds):
    """The nanoseconds of each record in some runs, and of as many that record nothing; runs of both take turns."""
    timed = {log: with_logs(log, run) for log in (TimedLog, TimedNoLog)}
    for log, call in timed.items():
        call()
        log.taken.clear()
    for _ in range(rounds):
        for call in timed.values():
            call()
    return TimedLog.taken, TimedNoLog.taken


@click.command()
@options(calls=20)
@click.option("--layers", default=4)
@click.option("--width", default=64)
@click.option("--context", default=64)
def main(rounds, calls, layers, width, context, json_file):
    """Print what a record costs, and the ratios of a collective and of a step with and without it."""
    settings = gpt_settings(layers=layers, width=width, context=context)
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        step = steps(settings, mesh, FREE)[OURS]
        for _ in range(3):
            step()
        taken, nothing = timed_records(step, rounds)
        count = len(taken) // rounds
        x = sw.MeshTensor.from_local(torch.ones(1), mesh, [Partial()])
        small = lambda: [x.redistribute(placements=[Replicate()]) for _ in range(100)]
        rows = [
            {"work": "100 all-reduces of 4 bytes", **pair(small, rounds, calls)},
            {"work": f"a GPT step with {count} collectives", **pair(step, rounds, calls)},
        ]
        loop = min(seconds(lambda: many_records(CollectiveLog()), 5) for _ in range(rounds)) / 10_000
    console().print(times_table("with and without records", rows, ("work",), ("recorded", "not recorded")))
    median = (statistics.median(taken) - statistics.median(nothing)) / 1e3
    lines = [
        line("a record, one after the other", f"< {LIMIT_US:g} µs", f"{loop * 1e6:.2f} µs", met=loop * 1e6 < LIMIT_US),
        line("- in a GPT step, where its memory is cold, median", "-", f"{median:.2f} µs", met=None),
    ]
    lines += [ratio_line(f"{r['work']}: with records", r["recorded"] / r["not recorded"], RATIO) for r in rows]
    report(rows, lines, json_file, in_a_step=median)


def pair(run, rounds, calls):
    runs = {"recorded": with_logs(CollectiveLog, run), "not recorded": with_logs(NoLog, run)}
    return interleaved(runs, rounds, calls)


if __name__ == "__main__":
    main()
