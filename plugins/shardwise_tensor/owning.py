"""Indices into a dim that is sharded: which of them fall into this rank's shard, and where in it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import LocalCall, is_traced, tied_to

__all__ = ["Owned", "look_up", "never_empty", "on_spare"]


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

    def at_spare(self, size: int) -> Tensor:
        """Positions in a shard of ``size`` with a spare slice behind it, which takes the entries of other ranks."""
        return torch.where(self.mine, self.at, torch.where(self.legal, size, size + 1))


def look_up(local: LocalCall, dim: int, index: Tensor, *, wraps: bool = False) -> Owned:
    """The indices into dim ``dim`` of ``self``; with ``wraps`` negative ones count from the end."""
    spec = local.spec("self")
    size, total, start = local.local_shape(spec)[dim], spec.shape[dim], local.offset(spec)[dim]
    counted = torch.where(index < 0, index + total, index) if wraps else index
    legal = (counted >= 0) & (counted < total)
    mine = (counted >= start) & (counted < start + size)
    if not size and not is_traced(index) and not legal.all():
        # Ops on an empty tensor do not look at their indices.
        msg = f"index is out of bounds for dimension {dim} with size {total}"
        raise IndexError(msg)
    elsewhere = torch.where(legal, 0, size)
    return Owned(mine, torch.where(mine, counted - start, elsewhere), legal)


def never_empty(x: Tensor, dims: Collection[int]) -> Tensor:
    """The shard; where it is empty along these dims, zeros of size one, since a look-up refuses an empty dim."""
    if all(x.shape[d] for d in dims):
        return x
    return tied_to(x.new_zeros([max(n, 1) if d in dims else n for d, n in enumerate(x.shape)]), x)


def on_spare(local: LocalCall, x: Tensor, dims: Collection[int], call: Callable[..., Tensor], **named: Any) -> Tensor:
    """What ``call(x, **named)`` leaves of the shard, called with one spare slice behind ``x`` along each of these dims.

    A graph has no entries to choose, because their number depends on data. It writes those of other ranks there.
    """
    target = named.get("out", x if local.call.signature.args[0].written else None)
    if "out" in named:
        named["out"] = x.new_empty(0)
    wide = x
    for d in dims:
        wide = torch.cat([wide, wide.new_zeros([1 if e == d else n for e, n in enumerate(wide.shape)])], d)
    result = call(wide, **named)
    for d in dims:
        result = result.narrow(d, 0, x.shape[d])
    return result if target is None else target.copy_(result)
