"""Division of a partial tensor by a number, zero included."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, LocalCall, TensorMeta, is_recorded, reduced

__all__ = ["by_one_number", "divide"]

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
    waits = local.spec("self").mesh.device_type != "cpu"  # the tensors themselves may stand for those of a device
    if isinstance(by, torch.Tensor) and (is_recorded(by) or (waits and x.nbytes <= _SMALL)):
        parts = x.clone()
        numerator = torch.where(by == 0, _whole(local, x), parts)
        return local.call.op(x.copy_(numerator) if local.call.signature.args[0].written else numerator, by, **named)
    is_zero = (by == 0).item() if isinstance(by, torch.Tensor) else by == 0
    return local.call.op(_whole(local, x) if is_zero else x, by, **named)


def _whole(local: LocalCall, x: torch.Tensor) -> torch.Tensor:
    """The sum of the parts; written over the part of this rank if the op writes it."""
    whole = reduced(local, local.spec("self"), x)
    return x.copy_(whole) if local.call.signature.args[0].written else whole
