"""``x[i, :, j]``: tensors as indices of some dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import Flow, Labels, LocalCall, TensorMeta, neutral, rule_from
from shardwise_tensor.owning import Owned, look_up, never_empty, with_indices_of_the_program

__all__ = ["RULES", "Indexing", "is_mask", "owned_block"]

aten = torch.ops.aten

_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool)


@frozen
class Indexing:
    """Names for all dims of one indexing: the indexed ones ``cut...``, those of the broadcast indices ``b...``.

    ``first`` is where the indices' dims stand in the result: at the first indexed dim when the indexed dims are next to
    each other, in front otherwise.
    """

    whole: Labels
    block: Labels
    result: Labels
    first: int

    @classmethod
    def of(cls, ndim: int, indices: Sequence[TensorMeta | Tensor | None]) -> Indexing:
        indexed = [d for d, index in enumerate(indices) if index is not None]
        whole = tuple(f"cut{d}" if d in indexed else f"d{d}" for d in range(ndim))
        block = tuple(f"b{d}" for d in range(max((i.ndim for i in indices if i is not None), default=0)))
        rest = tuple(name for d, name in enumerate(whole) if d not in indexed)
        adjacent = bool(indexed) and indexed == list(range(indexed[0], indexed[-1] + 1))
        first = indexed[0] if adjacent else 0
        return cls(whole, block, (*rest[:first], *block, *rest[first:]), first)

    @property
    def cuts(self) -> tuple[str, ...]:
        return tuple(name for name in self.whole if name is not None and name.startswith("cut"))

    def of_index(self, index: TensorMeta | None) -> Labels | None:
        """The labels of one index: the last of the block's."""
        return None if index is None else self.block[len(self.block) - index.ndim :]


def is_mask(index: TensorMeta | None) -> bool:
    """Whether an index is a mask: then the shape of the result depends on data."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def owned_block(
    local: LocalCall, x: Tensor, indices: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], Owned | None]:
    """The indices relative to this rank's shard, and which of them fall into it; ``None`` if all of them do.

    Torch takes indices from the CPU into a tensor of a card, and brings them there.
    """
    indices = [None if index is None else index.to(x.device) for index in indices]
    local_indices = list(indices)
    block: Owned | None = None
    for dim, index in enumerate(indices):
        if index is None or not local.sharding(local.spec("self"), dim):
            continue
        owned = look_up(local, dim, index, wraps=True)
        local_indices[dim] = owned.at
        block = owned if block is None else Owned(block.mine & owned.mine, owned.at, block.legal & owned.legal)
    return local_indices, block


@with_indices_of_the_program(wraps=True)
def _index_own(local: LocalCall, x: Tensor, indices: Sequence[Tensor | None], **named: Any) -> Tensor:
    own, block = owned_block(local, x, indices)
    indexed = [d for d, index in enumerate(indices) if index is not None]
    cut = [d for d in indexed if local.sharding(local.spec("self"), d)]
    picked: Tensor = local.call.op(never_empty(x, cut), own, **named)
    if block is None:
        return picked
    behind = x.ndim - len(indexed) - Indexing.of(x.ndim, indices).first
    return picked.masked_fill_(~block.mine[(..., *[None] * behind)], neutral("sum", picked.dtype))


def _index_on_meta(x: Tensor, indices: Sequence[Tensor | None], **out: Tensor) -> Tensor:
    """Torch's meta function refuses bytes, which kernels take, and other dtypes by an error of another type."""
    if any(index is not None and index.dtype not in _DTYPES for index in indices):
        msg = "tensors used as indices must be long, int, byte or bool tensors"
        raise IndexError(msg)
    flags = [index if index is None or index.dtype != torch.uint8 else index.bool() for index in indices]
    picked: Tensor = (aten.index.Tensor_out if out else aten.index.Tensor)(x, flags, **out)
    return picked


def _unsafe_index_on_meta(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """The kernel takes fewer dtypes than that of ``index``, and raises an error of another type, which it is asked for:
    it names the dtype.
    """
    for index in indices:
        if index is not None and index.dtype not in (torch.int64, torch.int32):
            aten._unsafe_index.Tensor(torch.zeros(1), [torch.zeros(1, dtype=index.dtype)])
    return _index_on_meta(x, indices)


def _indexed(x: TensorMeta, indices: Sequence[TensorMeta | None]) -> Flow:
    """Dims without an index pass; the indices are pointwise among themselves; a sharded indexed dim is masked."""
    if any(map(is_mask, indices)):
        return Flow([None], [None])
    names = Indexing.of(x.ndim, indices)
    return Flow(
        [names.whole, *map(names.of_index, indices)],
        [names.result],
        reduce=dict.fromkeys(names.cuts, "sum"),
        moves="self",
        lowered=names.cuts,
    )


INDEX = rule_from([aten.index.Tensor, aten.index.Tensor_out], lowering=_index_own, meta=_index_on_meta)(_indexed)
UNSAFE_INDEX = rule_from(aten._unsafe_index.Tensor, lowering=_index_own, meta=_unsafe_index_on_meta)(_indexed)


@rule_from(aten._unsafe_masked_index.default)
def MASKED_INDEX(x: TensorMeta, mask: TensorMeta, indices: Sequence[TensorMeta | None]) -> Flow:
    """As index, with indexed dims whole; the mask is sharded as the result."""
    names = Indexing.of(x.ndim, indices)
    if any(map(is_mask, indices)) or mask.ndim > len(names.result):
        return Flow([None], [None])
    whole = tuple(None if name in names.cuts else name for name in names.whole)
    of_mask = names.result[len(names.result) - mask.ndim :]
    return Flow([whole, of_mask, *map(names.of_index, indices)], [names.result])


RULES = (INDEX, UNSAFE_INDEX, MASKED_INDEX)
