"""The ring: each rank keeps its queries, keys and values go round, and the parts are put together exactly.

In each step a rank sends the keys and values that it has to the next one and receives those of the one before, while
it works on them. A block's result comes with the logarithm of the sum of its exponentials, by which blocks are weighed
against each other: softmax over all keys is the weighed mean of softmax over parts of them (Milakov and Gimelshein,
arXiv:1805.02867; Liu, Zaharia and Abbeel, arXiv:2310.01889). Sums are float32 where operands are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from shardwise.rule import LocalCall
from torch import Tensor

from shardwise_ring_attention.exchange import cut, exchange
from shardwise_ring_attention.geometry import length
from shardwise_ring_attention.place import SEQUENCE, Place, place

__all__ = ["Backward", "Forward", "ring_backward", "ring_forward"]

# (query, key, value, causal) -> (output, logsumexp) on one device; causal ones are square.
Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# (gradient, query, key, value, output, logsumexp, causal) -> gradients of query, key and value.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def ring_forward(local: LocalCall, kernel: Forward, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of this rank's queries against the keys of all ranks."""
    at = local.once(place)
    home, work = at.home, at.work
    (here,) = exchange(local, at, [query], home.queries, work.queries)
    out = here.new_zeros((*here.shape[:-1], value.shape[-1]), dtype=_wide(here.dtype))
    lse = out.new_full(here.shape[:-1], float("-inf"))
    for step, (keys, values) in enumerate(_blocks(local, at, key, value)):
        for piece in at.steps[step] if here.numel() else ():
            part = kernel(cut(here, piece.queries), cut(keys, piece.keys), cut(values, piece.keys), piece.causal)
            _merge(cut(out, piece.queries), cut(lse, piece.queries), *part)
    if at.only_keys:
        out, lse = _over_ranks(local, at.only_keys, out, lse)
    out, total = exchange(local, at, [out.to(query.dtype), lse.unsqueeze(-1)], work.queries, home.queries)
    return out, total.squeeze(-1)


def ring_backward(
    local: LocalCall,
    kernel: Backward,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; the operands are those of a kernel.

    Gradients of keys and values go round behind them, and each rank adds its part.
    """
    at = local.once(place)
    home, work = at.home, at.work
    grad, query, key, value, out, lse = operands
    of_queries = [grad, query, out, lse.unsqueeze(-1)]
    grad, here, out, total = exchange(local, at, of_queries, home.queries, work.queries)
    lse = total.squeeze(-1)
    of_query = here.new_zeros(here.shape, dtype=_wide(here.dtype))
    coming = None
    for step, (keys, values) in enumerate(_blocks(local, at, key, value)):
        packed = here.new_zeros(keys.numel() + values.numel(), dtype=of_query.dtype)
        of_keys, of_values = _unpacked(packed, keys, values)
        for piece in at.steps[step] if here.numel() else ():
            rows, columns = piece.queries, piece.keys
            held = (cut(grad, rows), cut(here, rows), cut(keys, columns), cut(values, columns), cut(out, rows))
            found = kernel(*held, cut(lse, rows).contiguous(), piece.causal)
            for total, part, where in zip((of_query, of_keys, of_values), found, (rows, columns, columns), strict=True):
                cut(total, where).add_(part)
        if coming is not None:
            packed += coming.wait()
        coming = local.comm.start_shift(packed, at.ring, 1, (_numel(at, step + 1, key, value),))
    (of_query,) = exchange(local, at, [of_query.to(query.dtype)], work.queries, home.queries)
    assert coming is not None
    like = _resized(at, 0, key), _resized(at, 0, value)
    gradients = [part.to(key.dtype) for part in _unpacked(coming.wait(), *like)]
    of_key, of_value = exchange(local, at, gradients, work.keys, home.keys)
    return of_query, of_key, of_value


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added up."""
    return torch.promote_types(dtype, torch.float32)


# -- keys and values on their way --------------------------------------------------------------------------------


def _blocks(local: LocalCall, at: Place, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of all ranks, this one's first. While a block is worked on, it is sent on and the next comes."""
    key, value = exchange(local, at, [key, value], at.home.keys, at.work.keys)
    if at.size == 1:
        yield key, value
        return
    packed = torch.cat([key.reshape(-1), value.reshape(-1)])
    for step in range(at.size):
        coming = None
        if step + 1 < at.size:
            coming = local.comm.start_shift(packed, at.ring, 1, (_numel(at, step + 1, key, value),))
        yield _unpacked(packed, _resized(at, step, key), _resized(at, step, value))
        if coming is not None:
            packed = coming.wait()


def _resized(at: Place, step: int, tensor: Tensor) -> Tensor:
    """A tensor without memory, shaped as the one of its kind that this rank has in a step."""
    count = length(at.work.keys[at.source(step)])
    return tensor.new_empty([count if d == SEQUENCE else n for d, n in enumerate(tensor.shape)], device="meta")


def _numel(at: Place, step: int, key: Tensor, value: Tensor) -> int:
    return _resized(at, step, key).numel() + _resized(at, step, value).numel()


def _unpacked(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    first, second = packed.split([key.numel(), value.numel()])
    return first.view(key.shape), second.view(value.shape)


# -- putting parts together --------------------------------------------------------------------------------------


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part over other keys, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_(_weight(lse, total)).add_(_weighed(part, part_lse, total))
    lse.copy_(total)


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """The share of keys with this logsumexp in all; none where they have no weight, as where there were none yet."""
    return (lse - total).exp().masked_fill(lse.isneginf(), 0).unsqueeze(-1)


def _weighed(part: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    # A mean over keys without weight is no number; what it counts for is nothing.
    return (part * _weight(lse, total)).masked_fill(lse.isneginf().unsqueeze(-1), 0)


def _over_ranks(local: LocalCall, mesh_dims: tuple[int, ...], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logsumexp over the keys of all ranks along some mesh dims, which have the same queries."""
    top = local.comm.all_reduce(lse, "max", mesh_dims)
    parts = torch.cat([_weighed(out, lse, top), _weight(lse, top)], -1)
    sums = local.comm.all_reduce(parts, "sum", mesh_dims)
    share = sums[..., -1:]
    return sums[..., :-1] / share, top + share.squeeze(-1).log()
