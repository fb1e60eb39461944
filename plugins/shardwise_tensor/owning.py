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
    """``mine`` says of each index whether this rank holds the element, and ``at`` where in the shard.

    ``at`` of an element that another rank holds is 0; of an index that no rank holds it is out of range, so that the
    local op refuses it as one device does.
    """

    mine: Tensor
    at: Tensor
    legal: Tensor

    @property
    def kept(self) -> Tensor:
        """Positions in the flat index of what this rank must write: its own, and what is out of range everywhere."""
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
    """The shard, or zeros of size one along these dims where it is empty: a look-up needs something to look into."""
    if all(x.shape[d] for d in dims):
        return x
    return x.new_zeros([max(n, 1) if d in dims else n for d, n in enumerate(x.shape)])
