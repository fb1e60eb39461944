"""Largest and smallest values, any and all: a reduced dim gives a partial max or min."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, Lowering, Op, Rule, labels, rule_from
from shardwise_reduce.dims import ops, reduced_dims, reduction, result_labels

__all__ = ["RULES", "least", "most"]


def least(dtype: torch.dtype) -> float | int | bool:
    """The value that changes no maximum."""
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else int(torch.iinfo(dtype).min)


def most(dtype: torch.dtype) -> float | int | bool:
    """The value that changes no minimum."""
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else int(torch.iinfo(dtype).max)


NEUTRAL = {"max": least, "min": most}


def _filled(kind: str) -> Lowering:
    """The op itself; for an empty shard, which the op refuses, the neutral value."""

    def lowering(local: LocalCall, x: torch.Tensor, *args: Any, out: Any = None) -> torch.Tensor:
        if x.numel():
            values: torch.Tensor = local.call.op(x, *args) if out is None else local.call.op(x, *args, out=out)
            return values
        spec = local.outputs[0]
        assert spec is not None
        value = NEUTRAL[kind](x.dtype)
        return x.new_full(local.local_shape(spec), value) if out is None else out.fill_(value)

    return lowering


def _extreme(of: tuple[Op, ...], kind: str) -> Rule:
    def describe(call: Call) -> Flow:
        return reduction(call, kind, partial=[f"{kind} -> {kind}"], lowered=True)

    describe.__doc__ = f"Any dim; a reduced one gives a partial {kind}."
    return rule_from(of, lowering=_filled(kind))(describe)


AMAX = _extreme(ops("amax.default amax.out max.default max.unary_out"), "max")
AMIN = _extreme(ops("amin.default amin.out min.default min.unary_out"), "min")


def _truth(name: str, of: tuple[Op, ...], kind: str) -> Rule:
    def on_meta(x: torch.Tensor, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        # For bytes torch's kernels write bools into an out= of bools, and its meta device refuses that.
        if out is None:
            return getattr(torch.ops.aten, name)(x, *args, **kwargs)  # type: ignore[no-any-return]
        x = x.to(out.dtype) if x.dtype == torch.uint8 and out.dtype == torch.bool else x
        return getattr(torch.ops.aten, name)(x, *args, out=out, **kwargs)  # type: ignore[no-any-return]

    def describe(call: Call) -> Flow:
        # any() of a maximum is the maximum of any() only if all values are bools.
        is_bool = call.args["self"].dtype == torch.bool
        return reduction(call, kind, partial=[f"{kind} -> {kind}"] if is_bool else [])

    describe.__doc__ = f"Any dim; a reduced one gives a partial {kind} of bools."
    return rule_from(of, meta=on_meta)(describe)


ANY = _truth("any", ops("any.default any.dim any.dims any.out any.dims_out any.all_out"), "max")
ALL = _truth("all", ops("all.default all.dim all.dims all.out all.dims_out all.all_out"), "min")


# -- both at once ------------------------------------------------------------------------------------------------


def _both_filled(local: LocalCall, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    outs = {name: tensor for name, tensor in kwargs.items() if isinstance(tensor, torch.Tensor)}
    if x.numel():
        return local.call.op(x, *args, **kwargs)
    values = []
    for spec, neutral, out in zip(local.outputs, (most, least), outs.values() or (None, None), strict=True):
        assert spec is not None
        value = neutral(x.dtype)
        values.append(x.new_full(local.local_shape(spec), value) if out is None else out.fill_(value))
    return tuple(values)


@rule_from(ops("aminmax.default aminmax.out"), lowering=_both_filled)
def aminmax(call: Call) -> Flow:
    """Any dim; a reduced one gives a partial min and a partial max."""
    names = labels(call.args["self"].ndim)
    rows = [f"d{d} -> min, max" for d in reduced_dims(call)]
    return Flow([names], [result_labels(call, names)], lowered=rows, scattered="*")


RULES = (AMAX, AMIN, ANY, ALL, aminmax)
