"""In-place ops on a partial tensor that no partial tensor passes: reduce it, run the op, and let it be partial again.

The written tensor has to stay partial, so one rank keeps the result of a sum and the others zeros; the result of an
average, a maximum or a minimum is the same on all. That costs the reduction now and another one later.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import REDUCE_OPS, LocalCall

__all__ = ["RESOLVED", "resolve"]

RESOLVED = tuple(f"{kind}, R, ... -> {kind}, ..." for kind in REDUCE_OPS)
# What leaves a reduction as it is, by kind; a kind that is not here takes the same value from every rank.
_NEUTRAL = {"sum": 0, "product": 1}


def resolve(local: LocalCall, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """The in-place op on the whole of a partial ``x``, put back so that reducing it gives the result."""
    partials = local.spec("self").reductions
    whole = x
    for mesh_dim, kind in reversed(partials.items()):
        whole = local.comm.all_reduce(whole, kind, (mesh_dim,))
    local.call.op(x.copy_(whole), *rest, **named)
    for mesh_dim, kind in partials.items():
        if kind in _NEUTRAL and local.coordinate[mesh_dim] != 0:
            x.fill_(_NEUTRAL[kind])
    return x
