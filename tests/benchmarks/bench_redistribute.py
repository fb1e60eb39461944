"""``redistribute`` through the public method: shardwise beside DTensor under the fake process group.

Run it with ``python tests/benchmarks/bench_redistribute.py [--rounds 7] [--calls 50] [--json FILE]``. Nothing is sent,
so what shows is the work around the collectives and their local copies. DTensor's method waits for its result before
it returns (``async_op=False``), as ours does. Every transition is measured with grad off and with inputs that require
grad, on even and on uneven shards.
"""

import click
import torch
from measuring import (
    DTENSOR,
    OURS,
    console,
    fake_world,
    geometric_mean,
    interleaved,
    options,
    ratio_line,
    report,
    times_table,
)
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.kernel.placements import show_all

P, R, S0, S1 = Partial(), Replicate(), Shard(0), Shard(1)
LIMIT = 0.25
CASES = {
    (4,): [([P], [R]), ([P], [S0]), ([S0], [R]), ([S1], [R]), ([S0], [S1]), ([S1], [S0]), ([R], [S0])],
    (2, 2): [
        ([P, P], [R, R]),
        ([P, R], [S0, R]),
        ([P, S0], [S0, S0]),
        ([S0, R], [R, R]),
        ([S0, S0], [R, R]),
        ([S0, S1], [R, R]),
        ([S0, R], [S1, R]),
        ([S0, S1], [S1, S0]),
        ([R, R], [S0, S1]),
        ([R, S0], [S0, R]),
    ],
}
SIZES = {"even": (32, 64), "uneven": (31, 63)}


def local_tensor(mesh, placements, shape):
    """This rank's part; a partial tensor is made from parts, since no whole tensor is partial."""
    settled = [R if isinstance(p, Partial) else p for p in placements]
    return sw.distribute_tensor(torch.randn(shape), mesh, settled, src_data_rank=None).to_local()


def measure(mesh, shape, source, target, grad, rounds, calls):
    local = local_tensor(mesh, source, shape)
    stride = (shape[1], 1)
    ours = sw.MeshTensor.from_local(local, mesh, source, shape=shape, stride=stride)
    operands = {OURS: ours, DTENSOR: ours.to_dtensor()}
    for kind, tensor in operands.items():
        operands[kind] = tensor.detach().requires_grad_(grad)
    runs = {kind: lambda t=tensor: t.redistribute(placements=target) for kind, tensor in operands.items()}
    with torch.set_grad_enabled(grad):
        return interleaved(runs, rounds, calls)


@click.command()
@options(calls=50)
def main(rounds, calls, json_file):
    """Print a table of medians and ratios."""
    rows = []
    with fake_world(4):
        for mesh_shape, moves in CASES.items():
            mesh = init_device_mesh("cpu", mesh_shape)
            for size, shape in SIZES.items():
                for source, target in moves:
                    for grad in (False, True):
                        move = f"{show_all(source)} to {show_all(target)}"
                        head = {"mesh": str(mesh_shape), "shards": size, "move": move, "grad": "on" if grad else "off"}
                        rows.append({**head, **measure(mesh, shape, source, target, grad, rounds, calls)})
    heads = ("mesh", "shards", "move", "grad")
    escaped = [{**row, "move": row["move"].replace("[", r"\[")} for row in rows]
    console().print(times_table("redistribute", escaped, heads, (OURS, DTENSOR)))
    report(rows, [*lines(rows)], json_file)


def lines(rows):
    """The mean over all rows is the figure; the parts say where it comes from."""
    times = sorted(row[DTENSOR] * 1e6 for row in rows)
    span = f"1 ({times[len(times) // 10]:.0f} to {times[-len(times) // 10]:.0f} µs)"
    work = f"redistribute, fake process group, geometric mean of {len(rows)}"
    yield ratio_line(work, geometric_mean([row[OURS] / row[DTENSOR] for row in rows]), LIMIT, dtensor=span)
    for head, value in (("mesh", "(4,)"), ("mesh", "(2, 2)"), ("grad", "off"), ("grad", "on"), ("shards", "uneven")):
        part = [row[OURS] / row[DTENSOR] for row in rows if row[head] == value]
        yield ratio_line(f"- {head} {value} (worst {max(part):.2f})", geometric_mean(part), LIMIT)


if __name__ == "__main__":
    main()
