"""Foreach reductions: a norm, a sum of powers or a maximum of each tensor of a list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shardwise.rule import Flow, LocalCall, Rule, rule_from
from shardwise.spec import TensorMeta, TensorSpec

__all__ = ["RULES"]

aten = torch.ops.aten
Elementwise = Callable[[Tensor], Tensor]


def _reduced(x: TensorMeta, kind: str, *, lowered: bool, partial: Sequence[str] = ()) -> Flow:
    """Any dim may be sharded; the result has none and is pending, or whole (``R``)."""
    dims = [f"d{d}" for d in range(x.ndim)]
    return Flow([dims], [()], reduce=dict.fromkeys(dims, kind), lowered=lowered, partial=partial)


# -- norms -------------------------------------------------------------------------------------------------------


def norms(
    local: LocalCall, tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Norms of whole tensors, with one all-reduce for all that are sharded over the same mesh dims."""
    specs = [spec for spec in local.specs("self") if spec is not None]
    found = _of_shards(local, tensors, specs, order, dtype)
    kind, power, root = _arithmetic(float(order))
    for mesh_dims, at in _grouped(local.sharding(spec) for spec in specs):
        if mesh_dims:
            powers = torch.stack([power(found[i].double()) for i in at])
            for i, norm in zip(at, root(local.comm.all_reduce(powers, kind, mesh_dims)), strict=True):
                found[i] = norm
    return [norm.to(spec.dtype) for norm, spec in zip(found, local.outputs, strict=True) if spec is not None]


def _of_shards(
    local: LocalCall,
    tensors: Sequence[Tensor],
    specs: Sequence[TensorSpec],
    order: float,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """Norms of local tensors; an empty shard counts for nothing, a tensor that is wholly empty is torch's affair."""
    there = [t.numel() > 0 or not spec.tensor_meta.numel for t, spec in zip(tensors, specs, strict=True)]
    some = [t for t, is_there in zip(tensors, there, strict=True) if is_there]
    if dtype is None and all(t.dtype.itemsize < torch.float32.itemsize for t in some):
        dtype = torch.float32  # so that half precision is rounded once, at the end
    found = iter(local.call.op(some, order, dtype) if some else ())
    nothing = math.inf if order < 0 else 0.0
    return [
        next(found) if is_there else t.new_tensor(nothing, dtype=torch.float64)
        for t, is_there in zip(tensors, there, strict=True)
    ]


def _arithmetic(order: float) -> tuple[str, Elementwise, Elementwise]:
    """How norms of parts make the norm of the whole: the reduction, what to do before it, what after it."""
    if math.isinf(order):
        return ("max" if order > 0 else "min"), torch.positive, torch.positive
    if order == 0:
        return "sum", torch.positive, torch.positive
    return "sum", lambda v: v**order, lambda v: v ** (1 / order)


def _grouped(keys: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Positions by key, in the order in which the keys first appear."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.items())


@rule_from(aten._foreach_norm.Scalar, zip_lists=True, lowering=norms)
def NORM(self: TensorMeta) -> Flow:
    """[...] -> [()], whole."""
    return _reduced(self, "R", lowered=True)


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
    """[...] -> [()], pending max; max -> max."""
    return _reduced(self, "max", lowered=True, partial=("max -> max",))


def _power_sums() -> tuple[Rule, ...]:
    """The rule for sums of powers, which came to torch with 2.11."""
    packet = getattr(aten, "_foreach_powsum", None)
    if packet is None:
        return ()

    @rule_from(packet.Scalar, zip_lists=True)
    def POWER_SUM(self: TensorMeta) -> Flow:
        """[...] -> [()], pending sum."""
        return _reduced(self, "sum", lowered=False)

    return (POWER_SUM,)


RULES = (NORM, MAX, *_power_sums())
