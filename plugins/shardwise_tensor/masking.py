"""Masks and look-ups by value: elementwise, or whole if positions of the result depend on data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import (
    UNMOVED,
    Call,
    Flow,
    Labels,
    LocalCall,
    TensorMeta,
    call_if,
    each,
    labels,
    neutral,
    row_major,
    rule,
    rule_from,
    tensor_if,
)
from shardwise_tensor.dtypes import same_dtype

__all__ = ["RULES"]

aten = torch.ops.aten


def _broadcast(x: TensorMeta, mask: TensorMeta) -> tuple[Labels, Labels, Labels]:
    ndim = max(x.ndim, mask.ndim)
    names = labels(ndim)
    return names[ndim - x.ndim :], names[ndim - mask.ndim :], names


# Reductions in which every rank's piece counts: the first rank alone has the value.
ONCE = ("sum", "product")


def _fill_once(local: LocalCall, x: Tensor, mask: Tensor, value: Any, **named: Any) -> Tensor:
    """The first rank of each partial mesh dim fills in the value, the others the neutral value."""
    beside = local.inputs[2] if isinstance(value, Tensor) else None
    kinds = [k for k in ONCE if local.counting_dims(local.spec("self"), beside, kind=k)]
    if kinds:
        others = [k for k in kinds if not local.counts(local.spec("self"), beside, kind=k)]
        nothing = neutral((others or kinds)[-1], x.dtype)
        if not isinstance(value, Tensor):
            return call_if(not others, local.call.op, (x, mask, value), (x, mask, nothing), named)
        value = tensor_if(not others, value, nothing)
    filled: Tensor = local.call.op(x, mask, value, **named)
    return filled


@rule_from(
    [aten.masked_fill_.Scalar, aten.masked_fill.Scalar, aten.masked_fill.Scalar_out],
    static=("value",),
    lowering=_fill_once,
)
def MASKED_FILL(x: TensorMeta, mask: TensorMeta, value: Any) -> Flow:
    """..., ... -> ...; a zero is zero under every reduction; another value goes to all ranks, or to one."""
    x_names, mask_names, names = _broadcast(x, mask)
    if value == 0:
        return Flow([x_names, mask_names], [names], moves="self")
    once = each(ONCE, "k, R -> k")
    return Flow([x_names, mask_names], [names], partial=[*each(UNMOVED, "k, R -> k"), *once], lowered=once)


@rule_from([aten.masked_fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill.Tensor_out], lowering=_fill_once)
def MASKED_FILL_FROM(x: TensorMeta, mask: TensorMeta, value: TensorMeta) -> Flow:
    """..., ..., () -> ..."""
    x_names, mask_names, names = _broadcast(x, mask)
    partials = ("*, R, * -> *",) if same_dtype(x, value) else ()
    once = each(ONCE, "k, R, R -> k")
    rows = [*partials, *each(UNMOVED, "k, R, R -> k"), *once]
    return Flow([x_names, mask_names, ()], [names], partial=rows, lowered=once)


BUCKETIZE = rule([aten.bucketize.Tensor, aten.bucketize.Tensor_out], "..., R -> ...")


@rule_from([aten.searchsorted.Tensor, aten.searchsorted.Tensor_out])
def SEARCH_SORTED(sorted_sequence: TensorMeta, x: TensorMeta) -> Flow:
    """Leading dims together in both; the sorted dim is whole. A single sorted row serves values of any shape."""
    names = labels(x.ndim)
    rows = (None,) if sorted_sequence.ndim == 1 else (*names[:-1], None)
    return Flow([rows, names, rows], [names])


def _row_major_where_static(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """The positions of ``nonzero_static`` are row-major, and those of ``nonzero`` are not."""
    return row_major(call, device_type) if call.op is aten.nonzero_static.default else call.outputs


@rule_from(
    [
        aten.bucketize.Scalar,
        aten.isin.Scalar_Tensor,
        aten.isin.Scalar_Tensor_out,
        aten.masked_scatter_.default,
        aten.masked_scatter.default,
        aten.masked_scatter.out,
        aten.masked_scatter_backward.default,
        aten.masked_select.default,
        aten.masked_select.out,
        aten.nonzero.default,
        aten.nonzero.out,
        aten.nonzero_static.default,
        aten.nonzero_static.out,
        aten.repeat_interleave.Tensor_out,
        aten.searchsorted.Scalar,
        aten.searchsorted.Scalar_out,
        aten._unique.default,
        aten._unique2.default,
        aten.unique_consecutive.default,
        aten.unique_dim.default,
        aten.unique_dim_consecutive.default,
    ],
    results=_row_major_where_static,
)
def WHOLE() -> Flow:
    """R -> R: each element of the result may depend on all elements."""
    return Flow([None], [None])


def _repeated_on_meta(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    # torch's meta kernel refuses a call without the size; the device takes it from the data.
    if output_size is None:
        raise NotImplementedError("without output_size only the data know the length")
    return repeats.new_empty(output_size, dtype=torch.int64)


@rule_from(aten.repeat_interleave.Tensor, meta=_repeated_on_meta)
def REPEATED() -> Flow:
    """R -> R: the result is as long as the sum of all elements."""
    return Flow([None], [None])


RULES = (MASKED_FILL, MASKED_FILL_FROM, BUCKETIZE, SEARCH_SORTED, WHOLE, REPEATED)
