"""Memory and work per rank as the ring grows, beside the rules that come with shardwise.

Run it with ``python tests/measure.py [--length 4096] [--rings 1,2,4,8] [--json]``.

Memory: every allocation of torch's CPU allocator during forward and backward of one attention on rank 0, as the
profiler records them, added up; the peak of that sum, with the operands. Work: the scores that each rank computes,
counted at the kernel; the largest over the mean. Ranks are gloo processes on this machine. There is one head by
default: where each rank can have heads of its own, the rules that come with shardwise exchange positions for heads and
gather nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.discovery.process import default_registry
from shardwise.testing import WorkerPool, mesh
from shardwise_ring_attention import rules
from shardwise_ring_attention.geometry import area, pieces

__all__ = ["contiguous_work", "observed_work", "peak_of_attention", "without_ring"]

MIB = 1 << 20


# -- on a worker -------------------------------------------------------------------------------------------------


@contextmanager
def without_ring() -> Iterator[None]:
    """While it lasts, attention goes by the rules that come with shardwise."""
    registry = default_registry()
    replaced = [e.rule for rule in rules.RULES for op in rule.ops for e in registry.find(op) if e.rule is not rule]
    undo = registry.override(*dict.fromkeys(replaced))
    try:
        yield
    finally:
        undo()


def operands(sizes: tuple[int, ...], mesh_shape: tuple[int, ...], layout: list[Any]) -> list[sw.MeshTensor]:
    """Query, key and value of ones, made where they lie: no rank ever has a whole one."""
    made = [sw.ones(*sizes, device_mesh=mesh(mesh_shape), placements=layout) for _ in range(3)]
    return [x.requires_grad_() for x in made]


def peak_of_attention(
    sizes: tuple[int, ...], mesh_shape: tuple[int, ...], layout: list[Any], *, causal: bool, without: bool = False
) -> int:
    """Bytes that this rank holds at most in forward and backward of one attention, operands included."""

    def call() -> None:
        query, key, value = operands(sizes, mesh_shape, layout)
        functional.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()

    if without:
        with without_ring():
            return _peak(call)
    return _peak(call)


def _peak(call: Callable[[], None]) -> int:
    call()  # plans and process groups
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def observed_work(sizes: tuple[int, ...], mesh_shape: tuple[int, ...], layout: list[Any], *, causal: bool) -> int:
    """The scores that this rank computes in one forward pass."""
    counted = [0]
    original = rules.ring_forward

    def counting(local: Any, kernel: Any, *operands: torch.Tensor) -> Any:
        def count(query: Any, key: Any, value: Any, square: bool) -> Any:
            rows, columns = query.shape[-2], key.shape[-2]
            counted[0] += rows * (rows + 1) // 2 if square else rows * columns
            return kernel(query, key, value, square)

        return original(local, count, *operands)

    rules.ring_forward = counting
    try:
        with torch.no_grad():
            functional.scaled_dot_product_attention(*operands(sizes, mesh_shape, layout), is_causal=causal)
    finally:
        rules.ring_forward = original
    return counted[0]


def contiguous_work(length: int, ranks: int) -> list[int]:
    """The scores by rank under a causal mask if each rank worked on the queries that it holds."""
    marks = [length * i // ranks for i in range(ranks + 1)]
    held = [((a, b),) for a, b in itertools.pairwise(marks)]
    return [sum(area(pieces(queries, keys, causal=True)) for keys in held) for queries in held]


# -- the table ---------------------------------------------------------------------------------------------------


def measured(ring: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One row: peaks by causal and not, with and without the ring, and the balance of a causal one."""
    layout = [sw.Shard(2)]
    row: dict[str, Any] = {"ring": ring}
    with WorkerPool(ring) as pool:
        for causal, name in ((False, "full"), (True, "causal")):
            row[name] = pool.run(_peak_on_worker, sizes, ring, layout, causal, False, timeout=600.0)[0]
            row[f"{name}, without"] = pool.run(_peak_on_worker, sizes, ring, layout, causal, True, timeout=600.0)[0]
        work = pool.run(_work_on_worker, sizes, ring, layout, timeout=600.0) if ring > 1 else [1]
    alone = contiguous_work(sizes[2], ring)
    row["balance"] = max(work) * ring / sum(work)
    row["balance, contiguous"] = max(alone) * ring / sum(alone)
    return row


def _peak_on_worker(sizes: tuple[int, ...], ring: int, layout: list[Any], causal: bool, without: bool) -> int:
    return peak_of_attention(sizes, (ring,), layout, causal=causal, without=without)


def _work_on_worker(sizes: tuple[int, ...], ring: int, layout: list[Any]) -> int:
    return observed_work(sizes, (ring,), layout, causal=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = ["ring", "full", "full, without", "causal", "causal, without", "balance", "balance, contiguous"]
    table = Table(*columns, title="peak MiB per rank; work of the busiest rank over the mean")
    for row in rows:
        peaks = [f"{row[name] / MIB:.1f}" for name in columns[1:5]]
        table.add_row(str(row["ring"]), *peaks, *(f"{row[name]:.2f}" for name in columns[5:]))
    return table


@click.command()
@click.option("--length", default=4096, help="Positions of the sequence.")
@click.option("--heads", default=1)
@click.option("--features", default=64, help="Features of a head.")
@click.option("--rings", default="1,2,4,8", help="Numbers of ranks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def main(length: int, heads: int, features: int, rings: str, as_json: bool) -> None:
    """Memory and work per rank as the ring grows."""
    rows = [measured(int(ring), (1, heads, length, features)) for ring in rings.split(",")]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        Console().print(_table(rows))


if __name__ == "__main__":
    main()
