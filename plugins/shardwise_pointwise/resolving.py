"""In-place ops on a partial tensor that does not pass them: reduce it, run the op, and make it partial again.

The written tensor has to stay partial, so one rank keeps the result of a sum and the others zeros; the result of an
average, a maximum or a minimum is the same on all. That costs the reduction now and another one later.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import REDUCE_OPS, LocalCall, neutral, reduced, tensor_if

__all__ = ["RESOLVED", "resolve"]

RESOLVED = tuple(f"{kind}, R, ... -> {kind}, ..." for kind in REDUCE_OPS)
# Every rank's piece counts in these; in the others all ranks have the same value.
_ONCE = ("sum", "product")


def resolve(local: LocalCall, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """The in-place op on the whole of a partial ``x``; afterwards a reduction of ``x`` gives the result."""
    spec = local.spec("self")
    whole = reduced(local, spec, x)
    # The op may raise, and then ``x`` must be what it was: it runs on other memory first.
    whole = whole.clone() if whole is x else whole
    local.call.op(whole, *rest, **named)
    x.copy_(whole)
    for kind in _ONCE:
        if local.counting_dims(spec, kind=kind):
            x.copy_(tensor_if(local.counts(spec, kind=kind), x, neutral(kind, x.dtype)))
    return x
