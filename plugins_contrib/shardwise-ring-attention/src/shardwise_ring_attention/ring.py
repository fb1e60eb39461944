"""The ring: each rank keeps its queries, keys and values go round, and the parts are joined exactly.

In each step a rank computes with the keys and values that it has. Meanwhile it sends them to the next rank and receives
those of the rank before. A block's result has the logarithm of the sum of its exponentials, which gives its
weight: softmax over all keys is the weighted mean of softmax over parts of them (Milakov and Gimelshein,
arXiv:1805.02867; Liu, Zaharia and Abbeel, arXiv:2310.01889). Sums are in float32 if operands are shorter.

Keys whose scores are all minus infinity have no weight: the logarithm is minus infinity, and the output adds zeros
times values, which are zeros, or NaN where a value is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.rule import AsyncResult, LocalCall
from shardwise_ring_attention.exchange import cut, exchange
from shardwise_ring_attention.geometry import Piece, Range, length
from shardwise_ring_attention.place import SEQUENCE, Place, place

__all__ = ["Backward", "Forward", "ring_backward", "ring_forward"]

# (query, key, value, causal) -> (output, logsumexp) on one device, in new memory; causal ones are square. The logsumexp
# is minus infinity where the keys have no weight.
Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# (gradient, query, key, value, output, logsumexp, causal) -> gradients of query, key and value.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def ring_forward(local: LocalCall, kernel: Forward, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of this rank's queries against the keys of all ranks.

    The logsumexp is minus infinity where no key has a weight.
    """
    at = local.once(place)
    home, work = at.home.queries, at.work.queries
    here = exchange(local, at, query, home, work)
    total = _Sum(here, value.shape[-1])
    for step, (keys, values) in enumerate(_blocks(local, at, key, value)):
        for piece in at.steps[step] if here.numel() else ():
            columns = cut(keys, piece.keys), cut(values, piece.keys)
            total.add(piece.queries, *kernel(cut(here, piece.queries), *columns, piece.causal))
    if at.only_keys:
        total.add_ranks(local, at.only_keys)
    out, lse = total.result()
    out = exchange(local, at, out.to(query.dtype), work, home)
    return out, exchange(local, at, lse.unsqueeze(-1), work, home).squeeze(-1)


def ring_backward(local: LocalCall, kernel: Backward, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; the operands are those of a kernel.

    Gradients of keys and values go round behind them, and each rank adds its part.
    """
    at = local.once(place)
    home, work = at.home.queries, at.work.queries
    grad, query, key, value, out, lse = operands
    rows = [exchange(local, at, x, home, work) for x in (grad, query, out, lse.unsqueeze(-1))]
    sums: list[Tensor | None] = [None, None, None]
    in_flight: list[AsyncResult] = []
    for step, columns in enumerate(_blocks(local, at, key, value)):
        sums[1:] = None, None
        for piece in at.steps[step] if rows[1].numel() else ():
            _add_gradients(kernel, piece, rows, columns, sums)
        parts = [_filled(total, x) for total, x in zip(sums[1:], columns, strict=True)]
        _add_received(parts, in_flight)
        in_flight = [_start(local, at, x, step + 1) for x in parts]
    of_query = _filled(sums[0], rows[1])
    del rows
    of_query = exchange(local, at, of_query.to(query.dtype), work, home)
    of_key, of_value = (one.wait().to(key.dtype) for one in in_flight)
    home, work = at.home.keys, at.work.keys
    return of_query, exchange(local, at, of_key, work, home), exchange(local, at, of_value, work, home)


def _add_gradients(
    kernel: Backward, piece: Piece, rows: list[Tensor], columns: tuple[Tensor, Tensor], sums: list[Tensor | None]
) -> None:
    """Add one piece's part to the gradients of query, key and value."""
    grad, query, out, lse = (cut(x, piece.queries) for x in rows)
    key, value = (cut(x, piece.keys) for x in columns)
    parts = kernel(grad, query, key, value, out, lse.squeeze(-1).contiguous(), piece.causal)
    places = (rows[1], piece.queries), (columns[0], piece.keys), (columns[1], piece.keys)
    for i, (part, (whole, where)) in enumerate(zip(parts, places, strict=True)):
        if sums[i] is None and part.shape == whole.shape:
            sums[i] = part.to(_wide(part.dtype))
        else:
            sums[i] = total = _filled(sums[i], whole)
            cut(total, where).add_(part)


def _add_received(parts: list[Tensor], in_flight: list[AsyncResult]) -> None:
    """Add the sums of the ranks before for the same keys; in the first step there are none."""
    for total, one in zip(parts, in_flight, strict=False):
        total.add_(one.wait())
    in_flight.clear()  # and the memory with them


def _filled(total: Tensor | None, like: Tensor) -> Tensor:
    """A sum of parts, or zeros where there were none."""
    return like.new_zeros(like.shape, dtype=_wide(like.dtype)) if total is None else total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added up."""
    return torch.promote_types(dtype, torch.float32)


# -- keys and values on their way --------------------------------------------------------------------------------


def _blocks(local: LocalCall, at: Place, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of all ranks, this one's first. During the work on a block the next one arrives."""
    key, value = (exchange(local, at, x, at.home.keys, at.work.keys) for x in (key, value))
    for step in range(1, at.size):
        in_flight = [_start(local, at, x, step) for x in (key, value)]
        yield key, value
        key, value = (one.wait() for one in in_flight)
        del in_flight
    yield key, value


def _start(local: LocalCall, at: Place, tensor: Tensor, step: int) -> AsyncResult:
    """Send a tensor of keys to the next rank, and receive one of the size that this rank has in ``step``."""
    count = length(at.work.keys[at.source(step)])
    shape = [count if d == SEQUENCE else n for d, n in enumerate(tensor.shape)]
    return local.comm.start_shift(tensor, at.ring, 1, shape)


# -- joining parts -----------------------------------------------------------------------------------------------


class _Sum:
    """Output and logsumexp over the keys so far.

    Kept are the largest logsumexp of a part, the sum of the weights beside it, and the outputs times their weights.
    They are divided at the end: a logsumexp of many digits before the point has no room for the weights behind it.
    """

    def __init__(self, query: Tensor, features: int) -> None:
        self._shape = (*query.shape[:-1], features)
        self._like = query
        self._parts: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, queries: Range, part: Tensor, lse: Tensor) -> None:
        """Add the output of some queries over further keys; this may overwrite ``part``."""
        part = part.to(_wide(part.dtype))
        if self._parts is None and part.shape == self._shape:
            self._parts = part, lse.new_ones(lse.shape).masked_fill_(lse.isneginf(), 0), lse
            return
        out, share, top = (cut(x, queries) for x in self._sums())
        highest = torch.maximum(top, lse)
        old, new = _weight(top, highest), _weight(lse, highest)
        out.mul_(old.unsqueeze(-1)).add_(part.mul_(new.unsqueeze(-1)))
        share.mul_(old).add_(new)
        top.copy_(highest)

    def add_ranks(self, local: LocalCall, mesh_dims: tuple[int, ...]) -> None:
        """Add the sums of all ranks along some mesh dims, which have the same queries."""
        out, share, top = self._sums()
        highest = local.comm.all_reduce(top, "max", mesh_dims)
        parts = torch.cat([out, share.unsqueeze(-1)], -1).mul_(_weight(top, highest).unsqueeze(-1))
        sums = local.comm.all_reduce(parts, "sum", mesh_dims)
        self._parts = sums[..., :-1], sums[..., -1], highest

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and logsumexp; zeros and minus infinity where no key has a weight."""
        out, share, top = self._sums()
        return out / share.masked_fill(share == 0, 1).unsqueeze(-1), top + share.log()

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._parts is None:
            out = self._like.new_zeros(self._shape, dtype=_wide(self._like.dtype))
            self._parts = out, out.new_zeros(self._shape[:-1]), out.new_full(self._shape[:-1], float("-inf"))
        return self._parts


def _weight(lse: Tensor, highest: Tensor) -> Tensor:
    """The weight of keys beside the highest logsumexp; zero if they have none, as before the first key."""
    return (lse - highest).exp_().masked_fill_(lse.isneginf(), 0)
