"""One operator of the sweep on one rank: scatter each sample in many ways, run it, and compare with one device."""

from __future__ import annotations

import random
import warnings
import zlib
from itertools import product

import torch
import torch.distributed as dist
from attrs import frozen
from database import FORWARD, IN_PLACE, entries, samples
from libraries import LIBRARIES, is_tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardwise.testing import mesh

UNWRITTEN = ("empty", "new_empty", "resize", "torch.empty")
"""How the names of operators begin whose result holds whatever was in memory: only its shape is compared."""

ORDER = ("wrong", "hang", "crash", "refused", "no rule", "pass")
"""From the worst outcome to the best; an operator's is the worst of its cases."""


@frozen
class Trial:
    """What every rank runs: an operator by name, in one library, on a mesh of this shape, in one direction.

    ``limit`` is the most samples, ``draws`` the number of drawn placements per sample beside the systematic ones,
    which come from ``seed``; ``partial`` lets them hold partial sums. ``device`` is the mesh's, and one device's.
    """

    name: str
    library: str
    shape: tuple[int, ...]
    direction: str
    limit: int
    draws: int
    seed: str
    partials: bool = False
    device: str = "cpu"


def check(trial):
    """Every case of one operator: a list of (outcome, sample number, placements, message)."""
    (entry,) = [e for e in entries() if e.name == trial.name]
    warnings.simplefilter("ignore")
    results = []
    for number, sample in enumerate(samples(entry.record, trial.direction, trial.device, limit=trial.limit)):
        leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        expected = _expected(entry.record, sample, leaves, tree, trial.direction)
        _await_device(trial, f"sample {number} on one device")
        if expected is None:
            continue
        for placing in placings(leaves, trial, number):
            case = _case(trial, entry.record, sample, leaves, tree, placing, expected)
            _await_device(trial, f"sample {number}, {_written(placing)}")
            outcome, message = _agreed(*case)
            if outcome == "wrong" and _only_rounds(trial, entry.record, sample, leaves, tree, placing):
                outcome, message = "pass", ""
            results.append((outcome, number, _written(placing), message))
    return results


def _await_device(trial, case):
    """A kernel that failed an assertion ends all that this process may do on its card: it must not go on."""
    if trial.device != "cpu":
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            msg = f"{case}: the device stopped: {error}"
            raise RuntimeError(msg) from error


def _only_rounds(trial, record, sample, leaves, tree, placing):
    """Whether a case that is wrong in float32 is right in float64, by a bound that is a thousand times nearer.

    Some gradients are zero but for rounding, which the steps before magnify (the orthogonal bases of pca_lowrank).
    """
    if torch.float32 not in {leaf.dtype for leaf in leaves if is_tensor(leaf)}:
        return False
    double = [
        leaf.detach().double().requires_grad_(leaf.requires_grad)
        if is_tensor(leaf) and leaf.dtype == torch.float32
        else leaf
        for leaf in leaves
    ]
    expected = _expected(record, sample, double, tree, trial.direction)
    if expected is None:
        return False
    case = _case(trial, record, sample, double, tree, placing, expected, nearer=1000)
    return _agreed(*case)[0] == "pass"


# -- where the operands lie ------------------------------------------------------------------------------------------


def placings(leaves, trial, number):
    """Placements for the tensors among the leaves: all whole; each dim sharded, over the last mesh dim and over all;
    then drawn ones.
    """
    mesh_ndim = len(trial.shape)
    tensors = [leaf if is_tensor(leaf) else None for leaf in leaves]
    whole = [None if t is None else (Replicate(),) * mesh_ndim for t in tensors]
    splits = [whole]
    for dim, over in product(range(max((t.ndim for t in tensors if t is not None), default=0)), {mesh_ndim, 1}):
        cut = (Replicate(),) * (mesh_ndim - over) + (Shard(dim),) * over
        splits += [[w if w is None or t.ndim <= dim else cut for t, w in zip(tensors, whole, strict=True)]]
    draw = random.Random(zlib.crc32(f"{trial.seed}/{trial.name}/{number}".encode()))  # noqa: S311
    splits += [
        [None if t is None else tuple(_drawn(draw, t, trial.partials) for _ in range(mesh_ndim)) for t in tensors]
        for _ in range(trial.draws)
    ]
    return list({repr(p): p for p in splits}.values())


def _drawn(draw, tensor, partials):
    index = draw.randrange(-1 - (partials and tensor.is_floating_point()), tensor.ndim)
    return Shard(index) if index >= 0 else Replicate() if index == -1 else Partial("sum")


def _written(placed):
    def short(p):
        return f"S({p.dim})" if isinstance(p, Shard) else "P" if p.is_partial() else "R"

    return " ".join(",".join(map(short, each)) for each in placed if each is not None)


# -- one case --------------------------------------------------------------------------------------------------------


def _run(record, direction, arguments):
    torch.manual_seed(7)
    first, args, kwargs = arguments
    return (record.inplace_variant if direction == IN_PLACE else record.op)(first, *args, **kwargs)


def _fresh(leaves):
    return [leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor(leaf) else leaf for leaf in leaves]


def _expected(record, sample, leaves, tree, direction):
    """The results, and gradients or the written operand, on one device; None where torch itself refuses the sample."""
    leaves = _fresh(leaves)
    try:
        results = _run(record, direction, tree_unflatten(leaves, tree))
        return _found(sample, results, leaves, direction, lambda x: x)
    except Exception:  # noqa: BLE001 - a sample that one device refuses says nothing of a mesh
        return None


def _found(sample, results, leaves, direction, whole):
    """What there is to compare, all of it on one device: the results, then what the direction asks for.

    Of results that are not unique (signs of singular vectors) the sample keeps what is.
    """
    found = sample.output_process_fn_grad(tree_map(whole, results))
    if direction == FORWARD:
        return found, None
    if direction == IN_PLACE:
        return found, [whole(leaf) for leaf in leaves if is_tensor(leaf)]
    wanted = [leaf for leaf in leaves if is_tensor(leaf) and leaf.requires_grad]
    outs = [o for o in tree_leaves(found) if is_tensor(o) and o.requires_grad]
    if not outs or not wanted:
        return found, None
    # A cotangent that differs at every element: a gradient that went to the wrong place shows.
    weights = [
        torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64, device=o.device).view(o.shape).to(o.dtype)
        for o in outs
    ]
    gradients = torch.autograd.grad(outs, wanted, weights, allow_unused=True)
    return found, [whole(g) for g in gradients]


def _case(trial, record, sample, leaves, tree, placed, expected, nearer=1):
    library = LIBRARIES[trial.library]
    where = mesh(trial.shape, device_type=trial.device)
    try:
        put = [
            leaf if p is None else library.scatter(leaf, where, p)
            for leaf, p in zip(_fresh(leaves), placed, strict=True)
        ]
        results = _run(record, trial.direction, tree_unflatten(put, tree))
        found = _found(sample, results, put, trial.direction, library.whole)
    except Exception as error:  # noqa: BLE001 - every error is an outcome
        return library.kind_of(error), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return _judged(record, found, expected, nearer)


def _judged(record, found, expected, nearer):
    loose = record.name.startswith(UNWRITTEN)
    try:
        _compare(found[0], expected[0], nearer, loose=loose)
        if expected[1] is not None:
            _compare(found[1], expected[1], nearer, loose=loose)
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:300]
    return "pass", ""


def _compare(found, expected, nearer, *, loose):
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    assert len(ours) == len(theirs), f"{len(ours)} results for {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if not is_tensor(b):
            assert (a is None) == (b is None), f"{a!r} for {b!r}"
            if b is None:
                continue
            a, b = torch.as_tensor(a), torch.as_tensor(b)  # noqa: PLW2901 - a number, compared as one
        assert is_tensor(a), f"{a!r} for a tensor"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.shape} {a.dtype} for {b.shape} {b.dtype}"
        if not loose:
            near = {"rtol": 2e-3 / nearer, "atol": 2e-4 / nearer}
            torch.testing.assert_close(a.detach(), b.detach(), **near, equal_nan=True, check_stride=False)


def _agreed(outcome, message):
    """The worst outcome of all ranks, which all give."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (outcome, message))
    return min(every, key=lambda one: ORDER.index(one[0]))
