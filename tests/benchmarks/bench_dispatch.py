"""Warm dispatch of one op: shardwise beside DTensor, a do-nothing subclass and bare local tensors.

Run it with ``python tests/benchmarks/bench_dispatch.py [--rounds 7] [--calls 300] [--json FILE]``. The fake process
group takes communication away, so that overhead shows. Each case dispatches exactly one op. "floor" is a tensor
subclass whose ``__torch_dispatch__`` holds the local call already, runs it and wraps what it returns: no unpacking, no
key, no look-up. What it costs, any subclass in Python costs.
"""

from functools import partial
from types import SimpleNamespace

import click
import torch
from measuring import (
    DTENSOR,
    OURS,
    PLAIN,
    console,
    fake_world,
    geometric_mean,
    interleaved,
    line,
    options,
    ratio_line,
    report,
    times_table,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.kernel import dispatcher

FLOOR = "floor"
MEAN_LIMIT, WORST_LIMIT = 0.45, 0.65

CASES = {
    # tensor arguments
    "mm": lambda o: torch.mm(o.x, o.w),
    "addmm": lambda o: torch.addmm(o.bias, o.x, o.w),
    "bmm": lambda o: torch.bmm(o.batch, o.batch_t),
    "add": lambda o: o.x + o.y,
    "where": lambda o: torch.where(o.mask, o.x, o.y),
    "relu": lambda o: torch.relu(o.x),
    "softmax": lambda o: torch.softmax(o.x, -1),
    "embedding": lambda o: functional.embedding(o.ids, o.table),
    # lists
    "cat": lambda o: torch.cat([o.x, o.y], 1),
    "stack": lambda o: torch.stack([o.x, o.y, o.x, o.y]),
    # optional tensors
    "layer_norm": lambda o: functional.layer_norm(o.x, (16,), o.scale, o.shift),
    "layer_norm, no weight": lambda o: functional.layer_norm(o.x, (16,)),
    "clamp, a tensor": lambda o: torch.clamp(o.x, min=o.y),
    # scalars
    "add a number": lambda o: o.x + 1.5,
    "pow": lambda o: o.x**2,
    "clamp": lambda o: torch.clamp(o.x, -1.0, 1.0),
    # keyword arguments
    "gelu tanh": lambda o: functional.gelu(o.x, approximate="tanh"),
    "sum keepdim": lambda o: torch.sum(o.x, 1, keepdim=True),
    "to float64": lambda o: o.x.to(dtype=torch.float64),
    "addcmul value": lambda o: torch.addcmul(o.x, o.y, o.y, value=0.5),
    # several outputs
    "max": lambda o: torch.max(o.x, 1),
    "split": lambda o: torch.split(o.x, 4, 1),
    # in place, out=
    "add_": lambda o: o.buffer.add_(o.idle),
    "mul_": lambda o: o.buffer.mul_(1.0),
    "add out=": lambda o: torch.add(o.idle, o.idle, out=o.result),
    # views
    "t": lambda o: o.x.t(),
    "transpose": lambda o: o.x.transpose(0, 1),
    "slice": lambda o: o.x[:, 2:5],
    "detach": lambda o: o.x.detach(),
    # local arguments that differ from the global ones
    "view": lambda o: o.x.view(o.rows, 4, 4),
    "expand": lambda o: o.column.expand(o.rows, 16),
    "zeros_like": lambda o: torch.zeros_like(o.x),
    "new_zeros": lambda o: o.x.new_zeros((o.rows, 16)),
    # an operand that must move first
    "add, redistributing": lambda o: o.x + o.elsewhere,
    "mm, redistributing": lambda o: torch.mm(o.x, o.w_rows),
}
GRADS = {"off": False, "on": True}


def placed(mesh):
    """Name -> (whole tensor, placements): rows over mesh dim 0, and columns over mesh dim 1 where there is one."""
    rest = mesh.ndim - 1
    rows, whole = [Shard(0), *[Replicate()] * rest], [Replicate()] * mesh.ndim
    columns = [Replicate(), Shard(1)] if rest else whole
    return {
        "x": (torch.randn(8, 16), rows),
        "y": (torch.randn(8, 16), rows),
        "w": (torch.randn(16, 12), columns),
        "bias": (torch.randn(12), [Replicate(), Shard(0)] if rest else whole),
        "batch": (torch.randn(8, 4, 4), rows),
        "batch_t": (torch.randn(8, 4, 4), rows),
        "mask": (torch.rand(8, 16) > 0, rows),
        "ids": (torch.randint(32, (8, 16)), rows),
        "table": (torch.randn(32, 16), whole),
        "scale": (torch.ones(16), whole),
        "shift": (torch.zeros(16), whole),
        "column": (torch.randn(8, 1), rows),
        "buffer": (torch.zeros(8, 16), rows),
        "idle": (torch.zeros(8, 16), rows),
        "result": (torch.zeros(8, 16), rows),
        "elsewhere": (torch.randn(8, 16), [Shard(1), *[Replicate()] * rest]),
        "w_rows": (torch.randn(16, 12), rows),
    }


NO_GRAD = ("mask", "ids", "buffer", "idle", "result")
STAYS_PLAIN = {"elsewhere": "y", "w_rows": "w"}
"""The operands that must move, and those that stand for them where nothing moves: plain has them in place already."""


def operand_sets(mesh, requires_grad):
    """The operands as each library has them; all are leaves that require grad where asked, as far as they can."""
    sets = {kind: SimpleNamespace(rows=8) for kind in (OURS, DTENSOR, PLAIN)}
    for name, (whole, placements) in placed(mesh).items():
        wants = requires_grad and name not in NO_GRAD
        ours = sw.distribute_tensor(whole, mesh, placements, src_data_rank=None)
        by_kind = {OURS: ours, DTENSOR: ours.to_dtensor(), PLAIN: ours.to_local()}
        for kind, tensor in by_kind.items():
            setattr(sets[kind], name, tensor.detach().clone().requires_grad_(wants))
    plain = sets[PLAIN]
    plain.rows = plain.x.shape[0]
    for name, stand_in in STAYS_PLAIN.items():
        setattr(plain, name, getattr(plain, stand_in))
    return sets


# -- the floor ---------------------------------------------------------------------------------------------------

_new = getattr(torch.Tensor, "_dtensor__new__", None)


class Recorder(TorchDispatchMode):
    """Keeps each op that runs, with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def floor_set(run, plain, ours):
    """Operands of a subclass made for one case: its dispatch runs the one recorded local op and wraps the results."""
    plans = []
    with dispatcher.observe(plans.append), torch.no_grad():
        run(ours)
    with Recorder() as recorder, torch.no_grad():
        run(plain)
    ((op, args, kwargs),) = recorder.calls
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    (plan,) = plans
    floor = _floor_class(op, partial(op._op, *args, **kwargs), plan.outs)
    operands = SimpleNamespace(**vars(ours))
    for name, tensor in vars(ours).items():
        if isinstance(tensor, torch.Tensor):
            tensor_like = _new(floor, getattr(plain, name).detach(), tensor._spec, False)
            setattr(operands, name, tensor_like.requires_grad_(tensor.requires_grad))
    return operands


def _floor_class(op, call, specs):
    """A subclass that answers every op with ``call()``, wrapped as the results of ``op`` are."""

    def one(func, types, args=(), kwargs=None, new=_new, spec=specs[0] if specs else None):
        return new(Floor, call(), spec, False)

    def several(func, types, args=(), kwargs=None, new=_new):
        return gathered([new(Floor, out, spec, False) for out, spec in zip(call(), specs, strict=True)])

    def in_place(func, types, args=(), kwargs=None):
        call()
        return args[0]

    def into_out(func, types, args=(), kwargs=None):
        call()
        return kwargs["out"]

    results = op._schema.returns
    gathered = list if len(results) == 1 else tuple
    answer = one if len(results) == 1 and str(results[0].type) == "Tensor" else several
    if op._schema.is_mutable:
        answer = into_out if any(a.is_out for a in op._schema.arguments) else in_place

    class Floor(torch.Tensor):
        __slots__ = ("_local_tensor", "_spec")
        __torch_function__ = torch._C._disabled_torch_function_impl
        __torch_dispatch__ = staticmethod(answer)

    return Floor


# -- measuring ---------------------------------------------------------------------------------------------------


def measure(mesh, grad, rounds, calls, chosen):
    """One row per case on one mesh."""
    rows = []
    for name, run in CASES.items():
        if chosen and name not in chosen:
            continue
        with torch.set_grad_enabled(grad):
            sets = operand_sets(mesh, grad)
            if _new is not None:
                sets[FLOOR] = floor_set(run, sets[PLAIN], sets[OURS])
            runs = {kind: lambda run=run, operands=operands: run(operands) for kind, operands in sets.items()}
            rows.append({"op": name, **interleaved(runs, rounds, calls)})
    return rows


@click.command()
@options(calls=300)
@click.option("--op", "chosen", multiple=True, help="Only these cases.")
def main(rounds, calls, json_file, chosen):
    """Print a table of medians and ratios."""
    rows = []
    with fake_world(4):
        for shape in ((4,), (2, 2)):
            mesh = init_device_mesh("cpu", shape)
            for name, grad in GRADS.items():
                rows += [
                    {"mesh": str(shape), "grad": name, **row} for row in measure(mesh, grad, rounds, calls, chosen)
                ]
    console().print(times_table("warm dispatch", rows, ("mesh", "grad", "op"), (OURS, DTENSOR, FLOOR, PLAIN)))
    report(rows, [*lines(rows)], json_file)


def lines(rows):
    """The mean and the worst over all cases, the mean with grad off and on, and the floor's."""
    worst = max(rows, key=lambda row: row[OURS] / row[DTENSOR])
    over_plain = geometric_mean([row[DTENSOR] / row[PLAIN] for row in rows])
    work = f"warm dispatch of one op, geometric mean of {len(rows)} (mesh (4,) and (2, 2), grad off and on)"
    yield ratio_line(work, _mean(rows), MEAN_LIMIT, dtensor=f"1 ({over_plain:.1f}x plain)")
    place = f"{worst['op']}, {worst['mesh']}, grad {worst['grad']}"
    yield ratio_line(f"- the worst: {place}", worst[OURS] / worst[DTENSOR], WORST_LIMIT)
    for name in GRADS:
        part = [row for row in rows if row["grad"] == name]
        yield ratio_line(f"- grad {name}", _mean(part), MEAN_LIMIT)
        if FLOOR in part[0]:
            text = f"{_mean(part, FLOOR):.2f}, worst {max(row[FLOOR] / row[DTENSOR] for row in part):.2f}"
            yield line(f"- grad {name}: a do-nothing subclass (floor)", "-", text, met=None, dtensor="1")


def _mean(rows, kind=OURS):
    return geometric_mean([row[kind] / row[DTENSOR] for row in rows])


if __name__ == "__main__":
    main()
