"""``x[i, :, j] = values``: values put, or added, where indices or a mask point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import UNMOVED, Flow, Labels, LocalCall, TensorMeta, is_traced, labels, rule_from
from shardwise_tensor.indexing import Indexing, is_mask, owned_block
from shardwise_tensor.owning import Owned, on_spare, with_indices_of_the_program
from shardwise_tensor.scattering import ADDED

__all__ = ["RULES"]

aten = torch.ops.aten


@with_indices_of_the_program(wraps=True)
def _put_own(
    local: LocalCall, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """The op with only those entries of the indices that fall into this rank's shard."""
    own, block = owned_block(local, x, indices)
    if block is not None and is_traced(x):
        cut = [d for d, index in enumerate(indices) if index is not None and local.sharding(local.spec("self"), d)]
        for d in cut:
            own[d] = Owned(block.mine, own[d], block.legal).at_spare(x.shape[d])  # type: ignore[arg-type]  # d is cut
        return on_spare(local, x, cut, lambda wide, **named: local.call.op(wide, own, values, *rest, **named), **named)
    if block is not None:
        own, values = _entries(x, own, values, block.mine | ~block.legal)
    result: Tensor = local.call.op(x, own, values, *rest, **named)
    return result


def _entries(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, mask: Tensor
) -> tuple[list[Tensor | None], Tensor]:
    """The entries that the mask selects: flat indices, and their values."""
    indexing = [index for index in indices if index is not None]
    shape: torch.Size = aten.broadcast_tensors.default(indexing)[0].shape
    positions = mask.expand(shape).reshape(-1).nonzero().flatten()
    flat = [None if index is None else index.expand(shape).reshape(-1)[positions] for index in indices]
    first = Indexing.of(x.ndim, indices).first
    rest = [n for d, n in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    there = values if values.ndim else values.to(x.device)  # torch takes a number from the CPU, and nothing else
    spread = there.expand([*rest[:first], *shape, *rest[first:]])
    lined_up = spread.reshape([*rest[:first], shape.numel(), *rest[first:]])
    return flat, lined_up.index_select(first, positions)


@rule_from(
    [
        aten.index_put_.default,
        aten.index_put.default,
        aten.index_put.out,
        aten._index_put_impl_.default,
        aten._index_put_impl.default,
        aten._index_put_impl.out,
        aten._unsafe_index_put.default,
    ],
    lowering=_put_own,
)
def INDEX_PUT(
    x: TensorMeta, indices: Sequence[TensorMeta | None], values: TensorMeta, accumulate: bool = False
) -> Flow:
    """Dims without an index pass; a sharded indexed dim takes what falls into it; parts of the indices add up."""
    if any(map(is_mask, indices)):
        return _by_mask(x, indices, values, accumulate)
    names = Indexing.of(x.ndim, indices)
    if values.ndim > len(names.result):
        return Flow([None], [None])
    inputs = [names.whole, *map(names.of_index, indices), _last(names.result, values.ndim)]
    rows = [*_added(len(indices)), *(_in_parts(name, inputs) for name in names.block)] if accumulate else []
    return Flow(inputs, [names.whole], partial=rows, lowered=names.cuts)


@rule_from(aten._unsafe_masked_index_put_accumulate.default)
def MASKED_INDEX_PUT(x: TensorMeta, mask: TensorMeta, indices: Sequence[TensorMeta | None], values: TensorMeta) -> Flow:
    """Dims without an index pass; parts of the indices add up."""
    names = Indexing.of(x.ndim, indices)
    if any(map(is_mask, indices)) or max(mask.ndim, values.ndim) > len(names.result):
        return Flow([None], [None])
    whole = tuple(None if name in names.cuts else name for name in names.whole)
    spread = [_last(names.result, mask.ndim), *map(names.of_index, indices), _last(names.result, values.ndim)]
    return Flow([whole, *spread], [whole], partial=[_in_parts(name, [whole, *spread]) for name in names.block])


def _last(names: Labels, count: int) -> Labels:
    return names[len(names) - count :]


def _added(count: int) -> list[str]:
    between = "R, " * count
    return [f"{x}, {between}{values} -> {result}" for x, values, result in ADDED]


def _in_parts(name: str | None, inputs: Sequence[Labels | None]) -> str:
    """The row in which each rank adds what its part of the indices says."""
    words = [name if dims is not None and name in dims else "R" for dims in inputs[1:]]
    return f"sum, {', '.join(map(str, words))} -> sum"


# -- by a mask ---------------------------------------------------------------------------------------------------


def _by_mask(x: TensorMeta, indices: Sequence[TensorMeta | None], values: TensorMeta, accumulate: bool) -> Flow:
    """Elementwise for one mask with the same value for all elements that it picks; else whole.

    It is long because the dims of the values depend on where the mask stands among the indices.
    """
    masks = [(d, index) for d, index in enumerate(indices) if index is not None]
    at, mask = masks[0]
    names = labels(x.ndim)
    # Dims of the result: those before the mask, one for all that it picks, those behind.
    result = (*names[:at], None, *names[at + mask.ndim :])
    picked = values.ndim - (len(result) - at)
    is_uniform = len(masks) == 1 and (picked < 0 or values.shape[picked] == 1) and values.ndim <= len(result)
    if not is_uniform:
        return Flow([None], [None])
    of_mask = [None if index is None else names[at : at + mask.ndim] for index in indices]
    between = "R, " * len(indices)
    put = [f"*, {between}* -> *", *(f"{k}, {between}R -> {k}" for k in UNMOVED)]
    rows = _added(len(indices)) if accumulate else put
    return Flow([names, *of_mask, _last(result, values.ndim)], [names], partial=rows)


RULES = (INDEX_PUT, MASKED_INDEX_PUT)
