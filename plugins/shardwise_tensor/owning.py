"""Indices into a dim that is sharded: which of them fall into this rank's shard, and where in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import LocalCall, dim_of, is_traced, tied_to

__all__ = ["Owned", "look_up", "never_empty", "on_spare", "with_indices_of_the_program"]

Lowering = Callable[..., Tensor]

# How kernels of the CPU name an index that is out of range, the size of its dim, and the dim: its number among all dims
# or among the indices.
_OUT_OF_RANGE = re.compile(
    r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)"
    r"|id=(?P<id>-?\d+) axis_dim=(?P<axis_dim>\d+)"
)


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
        msg = f"index {index[~legal][0].item()} is out of bounds for dimension {dim} with size {total}"
        raise IndexError(msg)
    elsewhere = torch.where(legal, 0, size)
    return Owned(mine, torch.where(mine, counted - start, elsewhere), legal)


def with_indices_of_the_program(*, wraps: bool = False) -> Callable[[Lowering], Lowering]:
    """Give a lowering's error for an index out of range the program's index and the size of the whole dim.

    The local op is given positions in this rank's shard, and its error names them. The lowering takes ``(x, dim, index,
    ...)`` or ``(x, indices, ...)``; with ``wraps`` negative indices count from the end.
    """

    def decorate(lowering: Lowering) -> Lowering:
        @functools.wraps(lowering)
        def call(local: LocalCall, x: Tensor, *args: Any, **named: Any) -> Tensor:
            try:
                return lowering(local, x, *args, **named)
            except (IndexError, RuntimeError) as error:
                text = _of_whole(str(error), local.spec("self").shape, _pairs(x.ndim, *args[:2]), wraps)
                if text == str(error) or type(error) not in (IndexError, RuntimeError):
                    raise
                raise type(error)(text) from error

        return call

    return decorate


def _pairs(ndim: int, where: int | Sequence[Tensor | None], index: Any = None) -> list[tuple[int, int, Tensor]]:
    """The indices with their dims, and the number that torch's error gives the dim: of several, that of the index."""
    if isinstance(where, int):
        dim = dim_of(where, ndim)
        return [(dim, dim, index)]
    indexed = ((dim, index) for dim, index in enumerate(where) if index is not None)
    return [(dim, number, index) for number, (dim, index) in enumerate(indexed)]


def _of_whole(text: str, shape: Sequence[int], pairs: Sequence[tuple[int, int, Tensor]], wraps: bool) -> str:
    """The text of an error with the first index that no rank has, its dim, and the size of the whole dim."""
    found = _OUT_OF_RANGE.search(text)
    if found is None:
        return text
    named = [pair for pair in pairs if found["dim"] is not None and pair[1] == int(found["dim"])]
    for dim, number, index in (*named, *pairs):  # look_up names the dim among all
        outside = index[(index < (-shape[dim] if wraps else 0)) | (index >= shape[dim])]
        if outside.numel():
            first, size = int(outside[0]), shape[dim]
            values = {"index": first, "id": first, "dim": number, "size": size, "axis_dim": size}
            there = [name for name in values if found[name] is not None]
            for name in sorted(there, key=found.start, reverse=True):
                text = f"{text[: found.start(name)]}{values[name]}{text[found.end(name) :]}"
            return text
    return text


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
