"""One operator of the sweep on one rank: scatter each sample in many ways, run it, and compare with one device."""

from __future__ import annotations

import random
import warnings
import zlib

import torch
import torch.distributed as dist
from database import entries, samples
from libraries import LIBRARIES, is_tensor
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardwise.testing import mesh

UNWRITTEN = ("empty", "new_empty", "resize")
"""Names of operators whose result holds whatever was in memory: only its shape is compared."""

ORDER = ("wrong", "hang", "crash", "refused", "no rule", "pass")
"""From the worst outcome to the best; an operator's is the worst of its cases."""


def check(name, library, shape, *, backward, limit, draws, seed):
    """Every case of one operator: a list of (outcome, sample number, placements, message)."""
    (entry,) = [e for e in entries(f"^{_escaped(name)}$") if e.name == name]
    warnings.simplefilter("ignore")
    found = []
    for number, sample in enumerate(samples(entry.record, backward=backward, limit=limit)):
        expected = _expected(entry.record, sample, backward=backward)
        if expected is None:
            continue
        leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        for placed in placings(leaves, len(shape), draws, f"{seed}/{name}/{number}"):
            outcome, message = _case(
                entry.record, LIBRARIES[library], mesh(shape), sample, leaves, tree, placed, expected
            )
            outcome, message = _agreed(outcome, message)
            found.append((outcome, number, _written(placed), message))
    return found


def _escaped(name):
    return name.replace(".", r"\.")


# -- where the operands lie ------------------------------------------------------------------------------------------


def placings(leaves, mesh_ndim, draws, seed):
    """Placements for the tensors among the leaves: all whole; each dim sharded, over the last mesh dim and over all;
    then drawn ones.
    """
    ndims = [leaf.ndim if is_tensor(leaf) else None for leaf in leaves]
    whole = [None if n is None else (Replicate(),) * mesh_ndim for n in ndims]
    found = [whole]
    for dim in range(max((n for n in ndims if n is not None), default=0)):
        for over in dict.fromkeys((mesh_ndim, 1)):
            cut = (Replicate(),) * (mesh_ndim - over) + (Shard(dim),) * over
            found.append([w if w is None or n <= dim else cut for n, w in zip(ndims, whole, strict=True)])
    draw = random.Random(zlib.crc32(seed.encode()))  # noqa: S311
    for _ in range(draws):
        found.append([None if n is None else tuple(_drawn(draw, n) for _ in range(mesh_ndim)) for n in ndims])
    return list({repr(p): p for p in found}.values())


def _drawn(draw, ndim):
    index = draw.randrange(-1, ndim)
    return Replicate() if index < 0 else Shard(index)


def _written(placed):
    short = {True: "R"}
    return " ".join(
        ",".join(short.get(p.is_replicate()) or f"S({p.dim})" for p in each) for each in placed if each is not None
    )


# -- one case --------------------------------------------------------------------------------------------------------


def _run(record, arguments):
    torch.manual_seed(7)
    first, args, kwargs = arguments
    return record.op(first, *args, **kwargs)


def _fresh(leaves):
    return [leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor(leaf) else leaf for leaf in leaves]


def _expected(record, sample, *, backward):
    """The results and gradients on one device; None where torch itself refuses the sample."""
    leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = _fresh(leaves)
    try:
        results = _run(record, tree_unflatten(leaves, tree))
        return _process(sample, results), (_gradients(sample, leaves, results, lambda x: x) if backward else None)
    except Exception:  # noqa: BLE001 - a sample that one device refuses says nothing of a mesh
        return None


def _process(sample, results):
    return sample.output_process_fn_grad(results) if hasattr(sample, "output_process_fn_grad") else results


def _gradients(sample, leaves, results, whole):
    """The gradients of all leaves that want one, from a cotangent that differs at every element."""
    wanted = [leaf for leaf in leaves if is_tensor(leaf) and leaf.requires_grad]
    outs = [o for o in tree_leaves(_process(sample, tree_map(whole, results))) if is_tensor(o) and o.requires_grad]
    if not outs or not wanted:
        return None
    weights = [torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).view(o.shape).to(o.dtype) for o in outs]
    return torch.autograd.grad(outs, wanted, weights, allow_unused=True)


def _case(record, library, where, sample, leaves, tree, placed, expected):
    try:
        put = [
            leaf if p is None else library.scatter(leaf, where, p)
            for leaf, p in zip(_fresh(leaves), placed, strict=True)
        ]
        arguments = tree_unflatten(put, tree)
        results = _run(record, arguments)
        found = _process(sample, tree_map(library.whole, results))
        grads = None
        if expected[1] is not None:
            grads = _gradients(sample, put, results, library.whole)
            grads = None if grads is None else [library.whole(g) for g in grads]
    except Exception as error:  # noqa: BLE001 - every error is an outcome
        return library.kind_of(error), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return _judged(record, found, expected[0], grads, expected[1])


def _judged(record, found, expected, grads, expected_grads):
    loose = record.name.startswith(UNWRITTEN) or record.name.endswith("empty")
    try:
        _compare(found, expected, loose=loose)
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:300]
    if expected_grads is None:
        return "pass", ""
    try:
        _compare(grads, list(expected_grads), loose=loose)
    except AssertionError as error:
        return "wrong", "gradient: " + " ".join(str(error).split())[:300]
    return "pass", ""


def _compare(found, expected, *, loose):
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    assert len(ours) == len(theirs), f"{len(ours)} results for {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if not is_tensor(b):
            assert a == b or (a != a and b != b) or type(a) is not type(b) or not isinstance(b, (int, float)), (a, b)
            continue
        assert is_tensor(a), f"{a!r} for a tensor"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.shape} {a.dtype} for {b.shape} {b.dtype}"
        if not loose:
            torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-3, atol=2e-4, equal_nan=True, check_stride=False)


def _agreed(outcome, message):
    """The worst outcome of all ranks, which all give."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (outcome, message))
    return min(every, key=lambda one: ORDER.index(one[0]))
