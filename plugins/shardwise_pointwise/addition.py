"""Addition of a whole tensor or a number to a partial sum: one rank adds it, not every rank."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import LocalCall, call_if, neutral, tensor_if

__all__ = ["ADDED_ONCE", "add_once"]

# By the number of tensors in the call.
ADDED_ONCE = {1: ("sum -> sum",), 2: ("sum, R -> sum", "R, sum -> sum")}


def add_once(local: LocalCall, x: torch.Tensor, y: Any, *rest: Any, **named: Any) -> Any:
    """``x + y`` or ``x - y`` where one is a partial sum: the other counts on the first rank only.

    The other ranks add a zero of the sign that leaves every zero as it is: -0.0, and 0.0 where it is subtracted.
    """
    x_spec, y_spec = (*local.inputs, None)[:2]
    result = local.outputs[0]
    assert result is not None
    alpha = rest[0] if rest else named.get("alpha", 1)
    scale = -1 if not isinstance(alpha, complex) and alpha < 0 else 1
    # The sign that the op gives to each term.
    signs = {"add": (1, scale), "sub": (1, -scale), "rsub": (-scale, 1)}
    x_sign, y_sign = signs[local.call.op.overloadpacket.__name__.rstrip("_")]
    if y_spec is not None and local.counting_dims(y_spec, x_spec):
        zero = neutral("sum", x.dtype)
        x = tensor_if(local.counts(y_spec, x_spec), x, zero if x_sign > 0 else -zero)
    if x_spec is not None and local.counting_dims(x_spec, y_spec):
        zero = neutral("sum", y.dtype if isinstance(y, torch.Tensor) else result.dtype)
        if result.dtype == torch.bool:
            zero = False
        elif y_sign < 0:
            zero = -zero
        counts = local.counts(x_spec, y_spec)
        if not isinstance(y, torch.Tensor):
            return call_if(counts, local.call.op, (x, y, *rest), (x, zero, *rest), named)
        y = tensor_if(counts, y, zero)
    return local.call.op(x, y, *rest, **named)
