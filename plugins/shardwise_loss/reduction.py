"""What ``reduction=`` means to a loss over shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.rule import LocalCall

__all__ = ["MEAN", "NONE", "scaled"]

# The values of ATen's ``reduction`` argument.
NONE, MEAN = 0, 1


def scaled(local: LocalCall, *args: Any, **kwargs: Any) -> Tensor:
    """The op on this rank's samples, times their share of all: ``reduction=mean`` divides by the local number of them.

    It serves a loss, which becomes a partial sum, and its backward. The share is counted in elements of ``self``.
    """
    spec = local.spec("self")
    result: Tensor = local.call.op(*args, **kwargs)
    total = spec.tensor_meta.numel
    if total == 0:
        return result
    here = 1
    for n in local.local_shape(spec):
        here *= n
    # A mean over no samples is NaN, and counts for nothing.
    return result.mul_(here / total) if here else result.zero_()
