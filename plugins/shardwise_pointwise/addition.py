"""Addition of a whole tensor or a number to a partial sum: it is added once, not once a rank."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import LocalCall

__all__ = ["ADDED_ONCE", "add_once"]

# By the number of tensors in the call.
ADDED_ONCE = {1: ("sum -> sum",), 2: ("sum, R -> sum", "R, sum -> sum")}


def add_once(local: LocalCall, x: torch.Tensor, y: Any, *rest: Any, **named: Any) -> Any:
    """``x + y`` or ``x - y`` where one is a partial sum: the other counts on the first rank only."""
    x_spec, y_spec = (*local.inputs, None)[:2]
    if x_spec is not None and not local.counts(x_spec, y_spec):
        y = torch.zeros_like(y) if isinstance(y, torch.Tensor) else type(y)(0)
    if y_spec is not None and not local.counts(y_spec, x_spec):
        x = torch.zeros_like(x)
    return local.call.op(x, y, *rest, **named)
