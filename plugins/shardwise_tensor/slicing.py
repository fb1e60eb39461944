"""Parts of a tensor along one dim, and their adjoints: a dim that is really cut must be whole, the others pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.rule import (
    REDUCE_OPS,
    REPLICATE,
    UNMOVED,
    Call,
    Flow,
    Labels,
    LocalCall,
    Row,
    Rows,
    TensorMeta,
    dim_of,
    each,
    labels,
    like,
    partial,
    replaced,
    rule_from,
    shard,
    show,
)
from shardwise_tensor.dtypes import same_dtype

__all__ = ["RULES"]

aten = torch.ops.aten


def _takes_all(size: int, start: int | None, end: int | None, step: int) -> bool:
    if any(isinstance(n, torch.SymInt) for n in (size, start, end, step)):
        # Python's slices make numbers of symbols. Of these comparisons most are known without a guard.
        first, last = start or 0, size if end is None else end
        return bool(step == 1 and (first == 0 or first + size <= 0) and last >= size)
    begin, stop, stride = slice(start, end, step).indices(size)
    return begin == 0 and len(range(begin, stop, stride)) == size


def _cut(x: TensorMeta, dim: int, start: int | None, end: int | None, step: int) -> set[int]:
    at = dim_of(dim, x.ndim)
    return set() if _takes_all(x.shape[at], start, end, step) else {at}


@rule_from([aten.slice.Tensor, aten.slice_copy.Tensor, aten.slice_copy.Tensor_out])
def SLICE(x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Flow:
    """Every dim passes but one that the slice really cuts."""
    return like(x, whole=_cut(x, dim, start, end, step), moves="self")


@rule_from([aten.narrow_copy.default, aten.narrow_copy.out])
def NARROW(x: TensorMeta, dim: int, start: int, length: int) -> Flow:
    """Every dim passes but the narrowed one."""
    return like(x, whole={dim_of(dim, x.ndim)}, moves="self")


@rule_from([aten.select.int, aten.select_copy.int, aten.select_copy.int_out])
def SELECT(x: TensorMeta, dim: int, index: int) -> Flow:
    """The selected dim is whole and vanishes, the others pass."""
    at = dim_of(dim, x.ndim)
    names = labels(x.ndim, {at})
    return Flow([names], [replaced(names, at)], moves="self")


# -- several parts -----------------------------------------------------------------------------------------------


@rule_from(
    [
        aten.split.Tensor,
        aten.split_copy.Tensor,
        aten.split_with_sizes.default,
        aten.split_with_sizes_copy.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    ]
)
def SPLIT(x: TensorMeta, sizes: Any, dim: int = 0) -> Flow:
    """Every dim passes but the split one."""
    return like(x, whole={dim_of(dim, x.ndim)}, moves="self")


@rule_from([aten.unbind.int, aten.unbind_copy.int])
def UNBIND(x: TensorMeta, dim: int = 0) -> Flow:
    """The unbound dim is whole and vanishes, the others pass."""
    at = dim_of(dim, x.ndim)
    names = labels(x.ndim, {at})
    return Flow([names], [replaced(names, at)], moves="self")


@rule_from(
    [
        aten.split_copy.Tensor_out,
        aten.split_with_sizes_copy.out,
        aten.unsafe_split.Tensor_out,
        aten.unsafe_split_with_sizes.out,
    ]
)
def SPLIT_INTO(x: TensorMeta, sizes: Any, dim: int = 0, *, call: Call) -> Rows:
    """Every dim passes but the split one; the parts, which the op does not return, lie as the whole."""
    return _into_parts(x, dim_of(dim, x.ndim), len(call.out_operands))


@rule_from(aten.unbind_copy.int_out)
def UNBIND_INTO(x: TensorMeta, dim: int = 0, *, call: Call) -> Rows:
    """The unbound dim is whole; the parts, which the op does not return, lack it."""
    return _into_parts(x, dim_of(dim, x.ndim), len(call.out_operands), drops=True)


def _into_parts(x: TensorMeta, at: int, count: int, *, drops: bool = False) -> Rows:
    # CUDA's kernel divides by the size of a part.
    sharded = [(shard(d), shard(d - (drops and d > at)), ((0, d),)) for d in range(x.ndim) if d != at]
    equal = [(p, p, ()) for p in (*map(partial, REDUCE_OPS), REPLICATE)]
    return Rows(
        tuple(
            Row((whole, *[part] * count), (), show(whole), nonempty=nonempty)
            for whole, part, nonempty in (*sharded, *equal)
        )
    )


# -- adjoints ----------------------------------------------------------------------------------------------------


def _local_input_sizes(local: LocalCall) -> Mapping[str, Any]:
    (result,) = local.outputs
    return {} if result is None else {"input_sizes": local.local_shape(result)}


# Outside of the part the results are zero on every rank, and every reduction of zeros is zero.


@rule_from([aten.slice_backward.default, aten.slice_backward.out], local_args=_local_input_sizes)
def SLICE_BACKWARD(grad: TensorMeta, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Flow:
    """Every dim passes but one that the slice really cut."""
    at = dim_of(dim, grad.ndim)
    return like(grad, whole=() if _takes_all(input_sizes[at], start, end, step) else {at}, moves="grad_output")


@rule_from([aten.select_backward.default, aten.select_backward.out], local_args=_local_input_sizes)
def SELECT_BACKWARD(grad: TensorMeta, input_sizes: Sequence[int], dim: int, index: int) -> Flow:
    """The selected dim comes back whole, the others pass."""
    at = dim_of(dim, len(input_sizes))
    names = labels(len(input_sizes), {at})
    return Flow([replaced(names, at)], [names], moves="grad_output")


# -- writing a part ----------------------------------------------------------------------------------------------


def _into(names: Labels, part: Labels, x: TensorMeta, src: TensorMeta) -> Flow:
    """A part put into a tensor: each element comes from one of the two."""
    partials = ("*, * -> *", *each(UNMOVED, "R, k -> k")) if same_dtype(x, src) else ()
    return Flow([names, part], [names], partial=[*partials, *each(UNMOVED, "k, R -> k")])


@rule_from([aten.slice_scatter.default, aten.slice_scatter.out])
def SLICE_SCATTER(
    x: TensorMeta, src: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Flow:
    """The source follows; the dim is whole unless the source covers all of it."""
    names = labels(x.ndim, _cut(x, dim, start, end, step))
    return _into(names, names, x, src)


@rule_from([aten.select_scatter.default, aten.select_scatter.out])
def SELECT_SCATTER(x: TensorMeta, src: TensorMeta, dim: int, index: int) -> Flow:
    """The source follows; the dim that it lacks is whole."""
    at = dim_of(dim, x.ndim)
    names = labels(x.ndim, {at})
    return _into(names, replaced(names, at), x, src)


@rule_from([aten.diagonal_scatter.default, aten.diagonal_scatter.out])
def DIAGONAL_SCATTER(x: TensorMeta, src: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Flow:
    """The source follows; the dims of the diagonal, which is the source's last, are whole."""
    whole = {dim_of(dim1, x.ndim), dim_of(dim2, x.ndim)}
    names = labels(x.ndim, whole)
    return _into(names, (*(n for n in names if n is not None), None), x, src)


RULES = (
    SLICE,
    NARROW,
    SELECT,
    SPLIT,
    UNBIND,
    SPLIT_INTO,
    UNBIND_INTO,
    SLICE_BACKWARD,
    SELECT_BACKWARD,
    SLICE_SCATTER,
    SELECT_SCATTER,
    DIAGONAL_SCATTER,
)
