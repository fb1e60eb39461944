"""Foreach reductions: a norm, a sum of powers or a maximum of each tensor of a list."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, Lowering, Rows, Rule, TensorMeta, labels, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten
Elementwise = Callable[[Tensor], Tensor]


def _reduction(x: TensorMeta, kind: str, *, lowered: str = "", partial: Sequence[str] = ()) -> Flow:
    """Any dim may be sharded; the result has no dims and is partial, or whole (``R``)."""
    gone = dict.fromkeys((f"d{d}" for d in range(x.ndim)), kind)
    return Flow([labels(x.ndim)], [()], reduce=gone, lowered=lowered, partial=partial, scattered="*")


# -- norms -------------------------------------------------------------------------------------------------------


@frozen
class _Group:
    """Tensors that are sharded over the same mesh dims, of one dtype, and whose norms have one dtype."""

    mesh_dims: tuple[int, ...]
    positions: tuple[int, ...]
    dtype: torch.dtype  # of the norms


@frozen
class _Layout:
    """How the norms of a list of shards are joined, the same at every call of a plan."""

    counts: tuple[bool, ...]  # per tensor: whether this rank's shard counts
    groups: tuple[_Group, ...]


def _layout(local: LocalCall) -> _Layout:
    specs = [spec for spec in local.specs("self") if spec is not None]
    # An op with out= returns nothing.
    dtypes = [result.dtype for result in (local.outputs or local.call.args["out"]) if result is not None]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (spec, dtype) in enumerate(zip(specs, dtypes, strict=True)):
        groups.setdefault((local.sharding(spec), dtype, spec.dtype), []).append(i)
    return _Layout(
        counts=tuple(math.prod(local.local_shape(s)) > 0 or not s.tensor_meta.numel for s in specs),
        groups=tuple(_Group(mesh_dims, tuple(at), dtype) for (mesh_dims, dtype, _), at in groups.items()),
    )


def norms(
    local: LocalCall, tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> Sequence[Tensor]:
    """Norms of whole tensors, with one all-reduce for all that are sharded over the same mesh dims."""
    layout = local.once(_layout)
    norms = _of_shards(local, tensors, layout.counts, order, dtype)
    if len(layout.groups) == 1:
        return _join(local, layout.groups[0], norms, order)
    for group in layout.groups:
        joined = _join(local, group, [norms[i] for i in group.positions], order)
        for i, norm in zip(group.positions, joined, strict=True):
            norms[i] = norm
    return norms


def _join(local: LocalCall, group: _Group, norms: list[Tensor], order: float) -> Sequence[Tensor]:
    """Norms of whole tensors from the norms of this rank's shards, which have one dtype unless a shard is empty."""
    if not group.mesh_dims:
        return [norm.to(group.dtype) for norm in norms]
    kind, power, root = _arithmetic(float(order))
    # In double precision, so that power and root together round only once.
    powers = power(torch.stack(norms).double())
    return root(local.comm.all_reduce(powers, kind, group.mesh_dims)).to(group.dtype).unbind()


def _of_shards(
    local: LocalCall, tensors: Sequence[Tensor], counts: Sequence[bool], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Norms of local tensors; an empty shard gets the neutral value, an empty tensor what torch gives it."""
    some = list(tensors) if all(counts) else [t for t, does_count in zip(tensors, counts, strict=True) if does_count]
    if dtype is None and all(t.dtype.itemsize < torch.float32.itemsize for t in some):
        dtype = torch.float32  # so that half precision is rounded once, at the end
    norms = list(aten._foreach_norm.Scalar(some, order, dtype)) if some else []
    if len(norms) == len(tensors):
        return norms
    left, neutral = iter(norms), math.inf if order < 0 else 0.0
    return [
        next(left) if does_count else t.new_tensor(neutral, dtype=dtype or t.abs().dtype)
        for t, does_count in zip(tensors, counts, strict=True)
    ]


def _arithmetic(order: float) -> tuple[str, Elementwise, Elementwise]:
    """How norms of parts give the norm of the whole: a reduction, a function before it, and one after it."""
    if math.isinf(order):
        return ("max" if order > 0 else "min"), torch.positive, torch.positive
    if order == 0:
        return "sum", torch.positive, torch.positive
    return "sum", lambda v: v**order, lambda v: v ** (1 / order)


@rule_from(aten._foreach_norm.Scalar, zip_lists=True, lowering=norms)
def NORM(self: TensorMeta) -> Flow:
    """[...] -> [()], whole."""
    return _reduction(self, "R", lowered="*")


def _into(lowering: Lowering) -> Lowering:
    """The same, with ``out=`` tensors that receive the results."""

    def into(local: LocalCall, tensors: Sequence[Tensor], *args: Any, out: Sequence[Tensor]) -> None:
        for target, result in zip(out, lowering(local, tensors, *args), strict=True):
            target.copy_(result)

    return into


def _without_results(flow: Flow, call: Call) -> Rows:
    """The rows of an op that returns nothing: its ``out=`` tensors have the placements of the results."""
    rows = flow.bind(evolve(call, outputs=call.out_operands)).rows
    return Rows(tuple(evolve(row, outputs=()) for row in rows))


@rule_from(aten._foreach_norm.Scalar_out, zip_lists=True, lowering=_into(norms))
def NORM_INTO(self: TensorMeta, *, call: Call) -> Rows:
    """[...] -> [()], whole."""
    return _without_results(_reduction(self, "R", lowered="*"), call)


# -- maxima and sums of powers -----------------------------------------------------------------------------------


def maxima(local: LocalCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Maxima of shards; an empty one has the lowest value of its dtype."""
    whole = [spec.tensor_meta.numel for spec in local.specs("self") if spec is not None]
    return [
        t.new_tensor(_lowest(t.dtype)) if n and not t.numel() else t.max() for t, n in zip(tensors, whole, strict=True)
    ]


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


@rule_from(aten._foreach_max.default, zip_lists=True, lowering=maxima)
def MAX(self: TensorMeta) -> Flow:
    """[...] -> [()], partial max; max -> max."""
    return _reduction(self, "max", lowered="*", partial=("max -> max",))


@rule_from(aten._foreach_max.out, zip_lists=True, lowering=_into(maxima))
def MAX_INTO(self: TensorMeta, *, call: Call) -> Rows:
    """[...] -> [()], partial max; max -> max."""
    return _without_results(_reduction(self, "max", lowered="*", partial=("max -> max",)), call)


def _power_sums() -> tuple[Rule, ...]:
    """The rule for sums of powers, which torch has from 2.11 on."""
    packet = getattr(aten, "_foreach_powsum", None)
    if packet is None:
        return ()

    @rule_from(packet.Scalar, zip_lists=True)
    def POWER_SUM(self: TensorMeta) -> Flow:
        """[...] -> [()], partial sum."""
        return _reduction(self, "sum")

    return (POWER_SUM,)


RULES = (NORM, NORM_INTO, MAX, MAX_INTO, *_power_sums())
