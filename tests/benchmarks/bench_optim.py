"""AdamW steps and foreach calls: shardwise beside DTensor and bare local tensors under the fake process group.

Run it with ``python tests/benchmarks/bench_optim.py [--rounds 7] [--calls 5] [--json FILE]``. Parameters come in two
layouts: "alike", all sharded over their rows, and "mixed", as tensor parallelism leaves them: rows, columns and whole
ones in turn. A line of the table takes the slower of the two. More than 200 come "mixed" only: DTensor's first step
over a list of 2,000 takes up to a minute.
"""

from functools import partial

import click
import torch
from measuring import (
    DTENSOR,
    KINDS,
    OURS,
    PLAIN,
    console,
    fake_world,
    interleaved,
    options,
    ratio_line,
    report,
    times_table,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Replicate, Shard

LAYOUTS = {
    "alike": [((16, 16), Shard(0))],
    "mixed": [((16, 16), Shard(0)), ((16, 16), Shard(1)), ((16,), Replicate())],
}
FORMS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}
LIMITS = {
    "AdamW foreach": 0.5,
    "AdamW fused": 0.25,
    "_foreach_add": 0.5,
    "_foreach_mul_": 0.5,
    "clip_grad_norm_": 0.5,
}
FEW = 200


def parameters(mesh, count, layout):
    """Per library: ``count`` parameters with gradients, laid out in the pattern of ``layout``."""
    optimizers = {kind: [] for kind in KINDS}
    pattern = LAYOUTS[layout]
    for i in range(count):
        shape, placement = pattern[i % len(pattern)]
        ours = sw.distribute_tensor(torch.randn(shape), mesh, [placement], src_data_rank=None)
        grad = sw.distribute_tensor(torch.randn(shape), mesh, [placement], src_data_rank=None)
        for kind, of in zip(KINDS, (lambda t: t, sw.MeshTensor.to_dtensor, sw.MeshTensor.to_local), strict=True):
            optimizers[kind].append(nn.Parameter(of(ours).detach().clone()))
            optimizers[kind][-1].grad = of(grad).detach().clone()
    return optimizers


def steps(mesh, count, layout, form):
    """One optimizer step per library."""
    by_kind = parameters(mesh, count, layout)
    return {kind: torch.optim.AdamW(params, lr=1e-3, **FORMS[form]).step for kind, params in by_kind.items()}


def tensors(mesh, count, layout):
    return {kind: [p.detach() for p in params] for kind, params in parameters(mesh, count, layout).items()}


def foreach_add(mesh, count, layout):
    return {
        kind: partial(torch._foreach_add, operands, operands) for kind, operands in tensors(mesh, count, layout).items()
    }


def foreach_mul_(mesh, count, layout):
    return {
        kind: partial(torch._foreach_mul_, operands, 1.0) for kind, operands in tensors(mesh, count, layout).items()
    }


def clip_grad_norm_(mesh, count, layout):
    by_kind = parameters(mesh, count, layout)
    return {kind: partial(nn.utils.clip_grad_norm_, params, 1.0) for kind, params in by_kind.items()}


CALLS = {"_foreach_add": foreach_add, "_foreach_mul_": foreach_mul_, "clip_grad_norm_": clip_grad_norm_}


def measure(mesh, counts, rounds, calls):
    for layout in LAYOUTS:
        for count in counts if layout == "mixed" else [count for count in counts if count <= FEW]:
            for form in FORMS:
                runs = steps(mesh, count, layout, form)
                few = max(1, calls * FEW // count)
                yield {"work": f"AdamW {form}", "tensors": count, "layout": layout, **interleaved(runs, rounds, few)}
        for name, make in CALLS.items():
            runs = make(mesh, FEW, layout)
            yield {"work": name, "tensors": FEW, "layout": layout, **interleaved(runs, rounds, calls)}


def lines(rows):
    """The slower layout of each kind of work that has a target."""
    for work, count in dict.fromkeys((row["work"], row["tensors"]) for row in rows):
        if work not in LIMITS:
            continue
        part = [row for row in rows if (row["work"], row["tensors"]) == (work, count)]
        slow = max(part, key=lambda row: row[OURS] / row[DTENSOR])
        over = f"1 ({slow[DTENSOR] / slow[PLAIN]:.1f}x plain)"
        yield ratio_line(
            f"{work}, {count:,} tensors ({slow['layout']})", slow[OURS] / slow[DTENSOR], LIMITS[work], dtensor=over
        )


@click.command()
@options(calls=5)
@click.option("--count", "counts", multiple=True, type=int, default=(200, 2000), show_default=True, help="Parameters.")
def main(rounds, calls, json_file, counts):
    """Print a table of medians and ratios."""
    with fake_world(4):
        rows = list(measure(init_device_mesh("cpu", (4,)), counts, rounds, calls))
    console().print(times_table("optimizer steps and foreach calls", rows, ("work", "tensors", "layout")))
    report(rows, [*lines(rows)], json_file)


if __name__ == "__main__":
    main()
