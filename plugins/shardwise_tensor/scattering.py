"""Elements written at indices along one dim, or added there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import (
    UNMOVED,
    Call,
    Flow,
    LocalCall,
    TensorMeta,
    dim_of,
    each,
    is_traced,
    labels,
    replaced,
    rule_from,
)
from shardwise_tensor.owning import look_up, on_spare, with_indices_of_the_program

__all__ = ["ADDED", "RULES"]

aten = torch.ops.aten

# Sums into a tensor: linear in both, and a value that is whole is the average of itself.
ADDED = (("sum", "sum", "sum"), ("avg", "avg", "avg"), ("avg", "R", "avg"))
ADDED_AT_INDEX = tuple(f"{x}, R, {source} -> {result}" for x, source, result in ADDED)
# Each rank adds what its part of the index says.
ADDED_IN_PARTS = "sum, picked, picked -> sum"


# -- scatter: an index per element -------------------------------------------------------------------------------


def _partly(dim: int, metas: Sequence[TensorMeta | None]) -> set[int]:
    """The dims, ``dim`` apart, of which the index or the source covers only a part."""
    shapes = [m.shape for m in metas if m is not None]
    ndim = len(shapes[0])
    return {d for d in range(ndim) if d != dim_of(dim, ndim) and len({s[d] for s in shapes}) > 1}


def _scattered(dim: int, call: Call, rows: tuple[str, ...] = (), in_parts: tuple[str, ...] = ()) -> Flow:
    """Dims that the index covers are sharded together.

    In the dim itself, and in a dim that the index covers in part, a shard takes the entries that fall into it.
    ``in_parts`` are rows for an index that is split along the dim as its source is.

    It is long because the sizes of index and source decide which dims are covered.
    """
    metas = [m for m in call.operands if m is not None]
    ndim = metas[0].ndim
    if not ndim or any(m.ndim != ndim for m in metas):
        return Flow([None], [None], partial=rows)
    at = dim_of(dim, ndim)
    partly = _partly(dim, metas)
    names = tuple("cut" if d == at else f"part{d}" if d in partly else f"d{d}" for d in range(ndim))
    same_length = len({m.shape[at] for m in metas[1:]}) == 1
    others = replaced(labels(ndim, partly), at, "picked" if same_length else None)
    return Flow(
        [names, *[others] * (len(metas) - 1)],
        [names],
        partial=(*rows, *in_parts) if same_length else rows,
        lowered={"cut", *(f"part{d}" for d in partly)},
    )


@with_indices_of_the_program()
def _scatter_own(local: LocalCall, x: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The op with only that part of index and source that falls into this rank's shard."""
    at = dim_of(dim, x.ndim)
    own = [_own_part(local, at, v) if isinstance(v, Tensor) else v for v in (index, *rest)]
    if local.sharding(local.spec("self"), at):
        return _scatter_into_cut(local, x, at, *own, **named)
    result: Tensor = local.call.op(x, at, *own, **named)
    return result


def _own_part(local: LocalCall, at: int, tensor: Tensor) -> Tensor:
    """The part of index or source beside this rank's shard, in dims that they cover in part and hold whole."""
    spec = local.spec("self")
    for d in _partly(at, local.call.operands):
        start = min(local.offset(spec)[d], tensor.shape[d])
        tensor = tensor.narrow(d, start, min(local.local_shape(spec)[d], tensor.shape[d] - start))
    return tensor


def _scatter_into_cut(local: LocalCall, x: Tensor, at: int, index: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The op on the shard and one spare slice, which takes what other ranks hold."""
    where = look_up(local, at, index).at_spare(x.shape[at])
    return on_spare(local, x, [at], lambda wide, **named: local.call.op(wide, at, where, *rest, **named), **named)


@rule_from(
    [
        aten.scatter_.src,
        aten.scatter.src,
        aten.scatter.src_out,
        aten.scatter_.reduce,
        aten.scatter.reduce,
        aten.scatter.reduce_out,
        aten.scatter_.value_reduce,
        aten.scatter.value_reduce,
        aten.scatter.value_reduce_out,
    ],
    lowering=_scatter_own,
)
def SCATTER(dim: int, *, call: Call) -> Flow:
    """Other dims together; a sharded dim takes the entries that fall into it."""
    return _scattered(dim, call)


@rule_from([aten.scatter_.value, aten.scatter.value, aten.scatter.value_out], lowering=_scatter_own)
def SCATTER_VALUE(dim: int, *, call: Call) -> Flow:
    """Other dims together; a sharded dim takes the entries that fall into it."""
    return _scattered(dim, call, each(UNMOVED, "k, R -> k"))


@rule_from([aten.scatter_add_.default, aten.scatter_add.default, aten.scatter_add.out], lowering=_scatter_own)
def SCATTER_ADD(dim: int, *, call: Call) -> Flow:
    """Other dims together; a sharded dim takes what falls into it; parts of the index add up to a partial sum."""
    return _scattered(dim, call, ADDED_AT_INDEX, (ADDED_IN_PARTS,))


@rule_from([aten.scatter_reduce_.two, aten.scatter_reduce.two, aten.scatter_reduce.two_out], lowering=_scatter_own)
def SCATTER_REDUCE(dim: int, reduce: str, *, include_self: bool = True, call: Call) -> Flow:
    """As scatter_add, under the reduction of the call."""
    if reduce == "sum" and include_self:
        return _scattered(dim, call, ADDED_AT_INDEX, (ADDED_IN_PARTS,))
    kind = {"sum": "sum", "prod": "product", "amax": "max", "amin": "min"}.get(reduce)
    kinds = () if kind is None else (kind,)
    # Without self, a rank that has no part of an element's sources would still offer the old value.
    parts = each(kinds, "k, picked, picked -> k") if include_self else ()
    return _scattered(dim, call, each(kinds, "k, R, k -> k"), parts)


# -- index_add and ops like it: an index per slice -------------------------------------------------------------------


@with_indices_of_the_program()
def _write_own(
    local: LocalCall, x: Tensor, dim: int, index: Tensor, source: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """The op with only those entries of index and source that fall into this rank's shard."""
    at = dim_of(dim, x.ndim)
    owned = look_up(local, at, index)
    if is_traced(x):
        where = owned.at_spare(x.shape[at])
        return on_spare(
            local, x, [at], lambda wide, **named: local.call.op(wide, at, where, source, *rest, **named), **named
        )
    entries = owned.entries
    result: Tensor = local.call.op(x, at, owned.at[entries], source.index_select(at, entries), *rest, **named)
    return result


@with_indices_of_the_program(wraps=True)
def _fill_own(local: LocalCall, x: Tensor, dim: int, index: Tensor, value: Any, **named: Any) -> Tensor:
    at = dim_of(dim, x.ndim)
    owned = look_up(local, at, index.reshape(-1), wraps=True)
    if is_traced(x):
        where = owned.at_spare(x.shape[at])
        return on_spare(local, x, [at], lambda wide, **named: local.call.op(wide, at, where, value, **named), **named)
    result: Tensor = local.call.op(x, at, owned.at[owned.entries], value, **named)
    return result


@rule_from([aten.index_add_.default, aten.index_add.default, aten.index_add.out], lowering=_write_own)
def INDEX_ADD(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta) -> Flow:
    """Other dims together; a sharded dim takes what falls into it; parts of the index add up to a partial sum."""
    return _slices(x, dim, index, source, (*ADDED_AT_INDEX, ADDED_IN_PARTS))


@rule_from(
    [
        aten.index_copy_.default,
        aten.index_copy.default,
        aten.index_copy.out,
        aten.index_reduce_.default,
        aten.index_reduce.default,
        aten.index_reduce.out,
    ],
    lowering=_write_own,
)
def INDEX_WRITE(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta) -> Flow:
    """Other dims together; a sharded dim takes the entries that fall into it."""
    return _slices(x, dim, index, source, ())


def _slices(x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, rows: tuple[str, ...]) -> Flow:
    if not x.ndim or x.ndim != source.ndim or not index.ndim:
        return Flow([None], [None])
    at = dim_of(dim, x.ndim)
    names = replaced(labels(x.ndim), at, "cut")
    return Flow([names, ("picked",), replaced(names, at, "picked")], [names], partial=rows, lowered={"cut"})


@rule_from(
    [
        aten.index_fill_.int_Scalar,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Scalar_out,
        aten.index_fill_.int_Tensor,
        aten.index_fill.int_Tensor,
        aten.index_fill.int_Tensor_out,
    ],
    lowering=_fill_own,
)
def INDEX_FILL(x: TensorMeta, dim: int, *, call: Call) -> Flow:
    """Every dim passes; a sharded dim takes the indices that fall into it."""
    names = replaced(labels(x.ndim), dim_of(dim, x.ndim), "cut") if x.ndim else ()
    whole = [None] * (len(call.operands) - 1)
    return Flow([names, *whole], [names], partial=each(UNMOVED, "k, R, ... -> k"), lowered={"cut"})


@rule_from([aten.put_.default, aten.put.default, aten.put.out])
def PUT() -> Flow:
    """R, R, R -> R: the index counts through the whole tensor."""
    return Flow([None], [None])


RULES = (SCATTER, SCATTER_VALUE, SCATTER_ADD, SCATTER_REDUCE, INDEX_ADD, INDEX_WRITE, INDEX_FILL, PUT)
