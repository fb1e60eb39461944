"""Multiplication of a partial tensor, and its division by a number: infinity and zero included."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from shardwise.rule import Call, LocalCall, TensorMeta, is_recorded
from shardwise_pointwise.resolving import reduced

__all__ = ["by_one_number", "divide", "multiply"]

# Bytes up to which a reduction of the parts costs less than to wait for the device: both are latency.
_SMALL = 1 << 16


def by_one_number(call: Call) -> bool:
    """Whether the result is linear in what is scaled, and there is one number to look at."""
    by = call.args["other"]
    return not call.args.get("rounding_mode") and not (isinstance(by, TensorMeta) and by.ndim)


def divide(local: LocalCall, x: torch.Tensor, by: Any, **named: Any) -> Any:
    """Divide the parts of a partial sum or average.

    By zero, the parts would give infinities of both signs where the whole gives one: reduce it first. What comes out is
    infinite or NaN everywhere, so adding or averaging it over the ranks leaves it as it is. A graph cannot look at a
    divisor that is a tensor, and has both numerators. So has a small tensor on an accelerator, where to look is to wait
    for the device: a large one waits, since to reduce it takes longer.
    """
    if isinstance(by, torch.Tensor) and (is_recorded(by) or (by.device.type != "cpu" and x.nbytes <= _SMALL)):
        parts = x.clone()
        numerator = torch.where(by == 0, _whole(local, x), parts)
        return local.call.op(x.copy_(numerator) if local.call.signature.args[0].written else numerator, by, **named)
    return local.call.op(_whole(local, x) if by == 0 else x, by, **named)


def multiply(local: LocalCall, *args: Any, **named: Any) -> Any:
    """An op that multiplies the parts of sums or averages by something else, here where that is infinite.

    Parts of both signs times infinity add up to NaN, and so does a part that is zero. So an operand is reduced first
    where a factor of its parts is infinite, and every rank has the result there: infinite or NaN, which adding or
    averaging it over the ranks leaves as it is. A factor may be partial itself, over other mesh dims: the ranks that
    reduce the operand hold the same part of it. Factors are looked at where that needs no waiting, on a CPU; a graph
    cannot look.
    """
    parts, every_factor = local.once(_parts_and_factors)
    infinite = [i for i in every_factor if not _is_finite(args[i])]
    everywhere = not all(map(_is_finite, named.values()))
    if not infinite and not everywhere:
        return local.call.op(*args, **named)
    whole = list(args)
    for i, factors in parts:
        where = [args[j] for j in factors if j in infinite]
        if where or everywhere:
            value = reduced(local, local.spec(local.call.operand_names[i]), args[i])
            by_number = everywhere or not all(isinstance(factor, torch.Tensor) for factor in where)
            whole[i] = value if by_number else torch.where(_all_finite(where), args[i], value)
    if local.call.signature.args[0].written and whole[0] is args[0]:
        whole[0] = whole[0].clone()
    values = local.call.op(*whole, **named)
    result = local.call.op(*args, **named)
    return result.copy_(torch.where(values.isfinite(), result, values))


def _parts_and_factors(local: LocalCall) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
    """The places of the arguments that are partial, each with those of its factors, which are not partial over its mesh
    dims; and the places of all factors. In these ops tensors come first.
    """
    partial = {i: spec.reductions.keys() for i, spec in enumerate(local.inputs) if spec is not None and spec.reductions}
    positional = range(len(local.call.signature.positional))
    parts = tuple(
        (i, tuple(j for j in positional if dims.isdisjoint(partial.get(j, ())))) for i, dims in partial.items()
    )
    return parts, tuple(sorted({j for _, factors in parts for j in factors}))


def _all_finite(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where all factors are neither infinite nor NaN."""
    return reduce(torch.logical_and, (factor.isfinite() for factor in factors))


def _is_finite(factor: Any) -> bool:
    """Whether a factor has no infinity and no NaN, as far as that can be seen without waiting for a device."""
    if type(factor) is not torch.Tensor:
        return not isinstance(factor, (float, complex)) or cmath.isfinite(factor)
    if not (factor.dtype.is_floating_point or factor.dtype.is_complex) or factor.device.type != "cpu":
        return True
    if is_recorded(factor):  # a graph has no values yet
        return True
    # Nothing that is added to an infinity or to NaN makes it finite again. A sum of finite elements may be infinite.
    return cmath.isfinite(factor.sum().item()) or bool(factor.isfinite().all())


def _whole(local: LocalCall, x: torch.Tensor) -> torch.Tensor:
    """The sum of the parts; written over the part of this rank if the op writes it."""
    whole = reduced(local, local.spec("self"), x)
    return x.copy_(whole) if local.call.signature.args[0].written else whole
