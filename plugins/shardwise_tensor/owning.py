"""Indices into a dim that is sharded: which of them fall into this rank's shard, and where in it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import LocalCall

__all__ = ["Owned", "look_up", "never_empty"]


@frozen(eq=False)
class Owned:
    """``mine`` says for each index whether this rank holds the element, and ``at`` is its position in the shard.

    If another rank holds the element, ``at`` is 0. If no rank holds it, ``at`` is out of range, so that the local op
    refuses it as one device does.
    """

    mine: Tensor
    at: Tensor
    legal: Tensor

    @property
    def entries(self) -> Tensor:
        """Entries of the flat index that this rank must write: its own, and those out of range on every rank."""
        return (self.mine | ~self.legal).flatten().nonzero().flatten()


def look_up(local: LocalCall, dim: int, index: Tensor, *, wraps: bool = False) -> Owned:
    """The indices into dim ``dim`` of ``self``; with ``wraps`` negative ones count from the end."""
    spec = local.spec("self")
    size, total, start = local.local_shape(spec)[dim], spec.shape[dim], local.offset(spec)[dim]
    counted = torch.where(index < 0, index + total, index) if wraps else index
    legal = (counted >= 0) & (counted < total)
    mine = (counted >= start) & (counted < start + size)
    if not size and not legal.all():
        # Ops on an empty tensor do not look at their indices.
        msg = f"index is out of bounds for dimension {dim} with size {total}"
        raise IndexError(msg)
    elsewhere = torch.where(legal, 0, size)
    return Owned(mine, torch.where(mine, counted - start, elsewhere), legal)


def never_empty(x: Tensor, dims: Collection[int]) -> Tensor:
    """The shard; where it is empty along these dims, zeros of size one, since a look-up refuses an empty dim."""
    if all(x.shape[d] for d in dims):
        return x
    return x.new_zeros([max(n, 1) if d in dims else n for d, n in enumerate(x.shape)])
