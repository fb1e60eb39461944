"""Multiplication and division of a partial tensor by a number, infinity and zero included."""

from __future__ import annotations

import cmath
from typing import Any

import torch

from shardwise.rule import Call, LocalCall, TensorMeta, is_traced

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
    if isinstance(by, torch.Tensor) and (is_traced(by) or (by.device.type != "cpu" and x.nbytes <= _SMALL)):
        parts = x.clone()
        numerator = torch.where(by == 0, _whole(local, x), parts)
        return local.call.op(x.copy_(numerator) if local.call.signature.args[0].written else numerator, by, **named)
    return local.call.op(_whole(local, x) if by == 0 else x, by, **named)


def multiply(local: LocalCall, x: torch.Tensor, by: Any, **named: Any) -> Any:
    """Multiply the parts of a partial sum or average by a number: as :func:`divide`, for a factor that is infinite.

    A factor that is a tensor is looked at where that needs no waiting, on a CPU.
    """
    seen = by.item() if type(by) is torch.Tensor and by.device.type == "cpu" else by
    infinite = isinstance(seen, (float, complex)) and not cmath.isfinite(seen)
    return local.call.op(_whole(local, x) if infinite else x, by, **named)


def _whole(local: LocalCall, x: torch.Tensor) -> torch.Tensor:
    """The sum of the parts; written over the part of this rank if the op writes it."""
    whole = x
    for mesh_dim, kind in reversed(local.spec("self").reductions.items()):
        whole = local.comm.all_reduce(whole, kind, (mesh_dim,))
    return x.copy_(whole) if local.call.signature.args[0].written else whole
