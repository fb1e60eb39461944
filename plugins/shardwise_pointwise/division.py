"""Division of a partial tensor by a number, zero included."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, LocalCall, TensorMeta

__all__ = ["by_one_number", "divide"]


def by_one_number(call: Call) -> bool:
    """Whether the quotient is linear in what is divided, and :func:`divide` can look at the divisor."""
    by = call.args["other"]
    return not call.args.get("rounding_mode") and not (isinstance(by, TensorMeta) and by.ndim)


def divide(local: LocalCall, x: torch.Tensor, by: Any, **named: Any) -> Any:
    """Divide the parts of a partial sum or average.

    By zero, the parts would give infinities of both signs where the whole gives one: reduce it first. What comes out is
    infinite or NaN everywhere, so adding or averaging it over the ranks leaves it as it is. A divisor that is a tensor
    on an accelerator is waited for.
    """
    if by == 0:
        whole = x
        for mesh_dim, kind in reversed(local.spec("self").reductions.items()):
            whole = local.comm.all_reduce(whole, kind, (mesh_dim,))
        x = x.copy_(whole) if local.call.signature.args[0].written else whole
    return local.call.op(x, by, **named)
