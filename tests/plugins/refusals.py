"""Sample calls with other dtypes, on one device and on a mesh: where one of the two raises, both must.

``python refusals.py PART PARTS`` runs a part of all ops and prints a JSON line for each difference. The mesh is over
torch's fake process group: refusals of dtypes are known when a plan is made, so no other rank is needed, and nothing
waits. Ops run in forks of this process, as some kernels end the process for some dtypes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing.samples import samples_of

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "programs")]

import made_programs  # noqa: E402  # beside this file
import oracle_rules  # noqa: E402

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.complex64]
DTYPES += [torch.float64]
LAYOUTS = {
    "R": lambda _: [Replicate()],
    "S(0)": lambda t: [Shard(0)] if t.ndim else [Replicate()],
    "S(-1)": lambda t: [Shard(t.ndim - 1)] if t.ndim else [Replicate()],
}
# Ops in one fork. After a crash the rest of them go on in another one.
TOGETHER = 4
# Operands of a list whose dtypes are changed one by one.
ONE_BY_ONE = 4


def mapped(change, value):
    """The value with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(change, part) for part in value)
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    return value


def tensors(value):
    found = []
    mapped(found.append, value)
    return found


def cast(tensor, dtype):
    """Small numbers of another dtype, without a zero to divide by and within any range of indices."""
    if tensor.is_complex() and not dtype.is_complex:
        tensor = tensor.real
    if tensor.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex):
        tensor = torch.ones_like(tensor)
    return tensor.to(dtype)


def variants(call):
    """What to do with the tensors of a call, by name."""
    present = tensors(call)
    for dtype in DTYPES:
        yield f"all {dtype}", dict.fromkeys(range(len(present)), dtype)
        floats = [i for i, t in enumerate(present) if t.is_floating_point() or t.is_complex()]
        if floats and len(floats) < len(present):
            yield f"floats {dtype}", dict.fromkeys(floats, dtype)
        if len(present) > 1:
            yield from ((f"{i} {dtype}", {i: dtype}) for i in range(min(len(present), ONE_BY_ONE)))


def changed(call, dtypes):
    numbers = iter(range(len(tensors(call))))

    def change(tensor):
        dtype = dtypes.get(next(numbers))
        return tensor.clone() if dtype is None else cast(tensor, dtype).clone()

    return mapped(change, call)


def answer(op, args, kwargs):
    """The error of a call, or the dtypes of its results."""
    try:
        return [str(t.dtype) for t in tensors(op(*args, **kwargs))]
    except Exception as error:  # noqa: BLE001  # a kernel may raise anything
        return f"{type(error).__name__}: {error}"[:160]


def differences(op, given, mesh):
    calls = [c for c in samples_of(op, given) if tensors(c) and all(0 < t.numel() < 5000 for t in tensors(c))]
    for call in calls[:1]:
        for name, dtypes in variants(call):
            one = answer(op, *changed(call, dtypes))
            for layout, placements in LAYOUTS.items():
                placed = mapped(lambda t, p=placements: sw.distribute_tensor(t, mesh, p(t)), changed(call, dtypes))
                found = answer(op, *placed)
                if isinstance(one, str) != isinstance(found, str) or (isinstance(one, list) and one != found):
                    yield {"op": str(op), "dtypes": name, "layout": layout, "one": one, "mesh": found}


def jobs():
    for plugin in oracle_rules.first_party():
        given = oracle_rules.declared(plugin.origin.plugin, "SAMPLES")
        for rule in oracle_rules.rules_of(plugin)[0]:
            for op in rule.ops:
                if op not in made_programs.WRONG_ON_ONE_DEVICE and op not in made_programs.OF_EIGHT_BITS:
                    yield op, given


def in_a_fork(some, mesh):
    """Print the differences of some ops, and the op in which the process ended, if it did. Returns how many ran."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as out:
            for op, given in some:
                out.write(json.dumps({"begins": str(op)}) + "\n")
                out.flush()
                out.writelines(json.dumps(line) + "\n" for line in differences(op, given, mesh))
        os._exit(0)
    os.close(write)
    begun = []
    with os.fdopen(read) as lines:
        for line in lines:
            name = json.loads(line).get("begins")
            if name is None:
                print(line, end="", flush=True)
            else:
                begun.append(name)
    if os.waitpid(child, 0)[1]:
        print(
            json.dumps({"op": begun[-1], "dtypes": "", "layout": "", "one": "", "mesh": "the process ended"}),
            flush=True,
        )
    return len(begun)


def main(part, parts):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    left = list(jobs())[part::parts]
    while left:
        left = left[in_a_fork(left[:TOGETHER], mesh) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
