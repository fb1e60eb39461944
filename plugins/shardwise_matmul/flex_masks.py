"""Block masks of flex attention: what they are as tuples, and the part of one for a shard of the queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import NoStrategyError
from shardwise.rule import LocalCall

__all__ = ["FUNCTION", "block_of_queries", "check_size", "part_of_mask", "unmasked"]

# A block mask as a tuple: two lengths; the key blocks of each query block, partial ones and full ones; the query blocks
# of each key block, likewise; the order of writes in the backward; the sizes of a block of queries and of keys; the
# function.
_BY_QUERY = (2, 3, 4, 5)
_BY_KEY = ((6, 7), (8, 9))
_WRITE_ORDER = slice(10, -3)
_QUERY_BLOCK, FUNCTION = -3, -1
# The size of a block of the mask that torch makes where none is given.
_WHOLE = 1 << 30


def unmasked(queries: int, keys: int) -> tuple[Any, ...]:
    """The block mask of a call without one."""
    return (queries, keys, *[None] * 12, _WHOLE, _WHOLE, _no_mask)


def _no_mask(batch: Any, *_: Any) -> Any:
    return batch.new_ones((), dtype=torch.bool)


def block_of_queries(mask: Sequence[Any]) -> int | None:
    """The size of the blocks in which the queries are sharded; 0 if they stay whole, ``None`` if anything goes."""
    if any(part is not None for part in mask[_WRITE_ORDER]):
        return 0  # an order of writes belongs to all queries of the mask
    return None if mask[_QUERY_BLOCK] >= _WHOLE else int(mask[_QUERY_BLOCK])


def check_size(mask: tuple[Any, ...], query: Tensor) -> None:
    """Refuse a block mask whose batch or heads are not those of the whole query: a rank could not tell its part."""
    numbers = mask[_BY_QUERY[0]]
    if numbers is None or all(n in (1, size) for n, size in zip(numbers.shape[:2], query.shape[:2], strict=True)):
        return
    # Traced for several sizes they are symbols; a message has the numbers.
    asked, found = ([int(n) for n in t.shape[:2]] for t in (query, numbers))
    raise NoStrategyError(
        asked=f"run flex_attention with a query of {asked[0]} batch elements and {asked[1]} heads",
        found=f"a block mask of {found[0]} batch elements and {found[1]} heads",
        do="Make the block mask for the whole query: create_block_mask with B and H of its global shape, or None.",
    )


def part_of_mask(local: LocalCall, mask: Sequence[Any], block: int | None) -> tuple[Any, ...]:
    """The part of a block mask for this rank's queries, which are sharded in whole blocks of this size."""
    spec = local.spec("query")
    first, sizes = local.offset(spec), local.local_shape(spec)

    def narrow(tensor: Tensor) -> Tensor:
        for dim in (0, 1):  # a dim of one element serves all
            if tensor.dim() > dim and tensor.shape[dim] != 1:
                tensor = tensor.narrow(dim, first[dim], sizes[dim])
        return tensor

    part = [narrow(value) if isinstance(value, Tensor) else value for value in mask]
    if sizes[2] == spec.shape[2] or not block:
        return tuple(part)
    start, count = first[2] // block, -(-sizes[2] // block)
    for i in _BY_QUERY:
        if part[i] is not None:
            part[i] = part[i].narrow(2, start, count)
    for numbers, indices in _BY_KEY:
        if part[numbers] is not None:
            part[numbers], part[indices] = _columns(part[numbers], part[indices], start, count)
    part[0] = sizes[2]
    return tuple(part)


def _columns(numbers: Tensor, indices: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Some columns of a sparse matrix: per row, how many columns it has, and which, those that count in front."""
    columns = torch.arange(indices.shape[-1], device=indices.device)
    counted = columns < numbers.unsqueeze(-1)
    dense = torch.zeros_like(indices).scatter_add(-1, indices.long(), counted.to(indices.dtype))
    part = dense.narrow(-1, start, count)
    order = part.argsort(dim=-1, descending=True, stable=True)
    return part.sum(-1, dtype=numbers.dtype), order.to(indices.dtype)
