"""Attention in its math form, warm: shardwise beside DTensor and bare local tensors under the fake process group.

Run it with ``python tests/benchmarks/bench_attention.py [--rounds 7] [--calls 40] [--json FILE]``. torch composes it of
a dozen ops. Heads are sharded, so nothing is sent. There is no causal mask: DTensor refuses the plain one that torch
makes.
"""

from functools import partial

import click
import torch
from measuring import DTENSOR, KINDS, OURS, PLAIN, console, fake_world, interleaved, options, ratio_line, report
from measuring import times_table as table
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise import Shard

LIMIT = 0.2
SHAPE = (4, 4, 8, 16)  # batch, heads, positions, size of a head


def operands(mesh):
    """Per library: query, key and value."""
    ours = [sw.distribute_tensor(torch.randn(SHAPE), mesh, [Shard(1)], src_data_rank=None) for _ in range(3)]
    forms = (lambda t: t, sw.MeshTensor.to_dtensor, sw.MeshTensor.to_local)
    return {
        kind: [of(t).detach().clone().requires_grad_() for t in ours] for kind, of in zip(KINDS, forms, strict=True)
    }


def forward(tensors):
    with torch.no_grad():
        functional.scaled_dot_product_attention(*tensors)


def both_ways(tensors):
    functional.scaled_dot_product_attention(*tensors).sum().backward()


def measure(mesh, rounds, calls):
    tensors = operands(mesh)
    with sdpa_kernel(SDPBackend.MATH):
        for work, run in (("forward", forward), ("forward and backward", both_ways)):
            runs = {kind: partial(run, tensors[kind]) for kind in KINDS}
            yield {"work": work, **interleaved(runs, rounds, calls)}


@click.command()
@options(calls=40)
def main(rounds, calls, json_file):
    """Print a table of medians and ratios."""
    with fake_world(4):
        rows = list(measure(init_device_mesh("cpu", (4,)), rounds, calls))
    console().print(table("attention in its math form", rows, ("work",)))
    lines = [
        ratio_line(
            f"attention in its math form, warm, {row['work']}",
            row[OURS] / row[DTENSOR],
            LIMIT,
            dtensor=f"1 ({row[DTENSOR] / row[PLAIN]:.1f}x plain)",
        )
        for row in rows
    ]
    report(rows, lines, json_file)


if __name__ == "__main__":
    main()
