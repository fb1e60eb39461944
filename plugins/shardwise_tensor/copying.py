"""Copies, casts, fills and questions about a whole tensor."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from shardwise.rule import (
    ANY,
    REDUCE_OPS,
    UNMOVED,
    Call,
    Flow,
    LocalCall,
    TensorMeta,
    each,
    labels,
    like,
    rule,
    rule_from,
)
from shardwise_tensor.devices import stays_on_mesh
from shardwise_tensor.dtypes import commuting_with_cast, same_dtype

__all__ = ["RULES"]

aten = torch.ops.aten

SAME = rule(
    [
        aten.clone.default,
        aten.clone.out,
        aten.detach.default,
        aten.detach_.default,
        aten.detach_copy.default,
        aten.detach_copy.out,
        aten.alias.default,
        aten.alias_copy.default,
        aten.alias_copy.out,
        aten.lift.default,
        aten.lift.out,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh_copy.out,
        aten._pin_memory.default,
        aten._pin_memory.out,
    ],
    "... -> ...",
    moves="self",
)


@rule_from([aten._to_copy.default, aten._to_copy.out], local_args=stays_on_mesh)
def TO_COPY(x: TensorMeta, call: Call) -> Flow:
    """... -> ..., and the reductions that commute with the cast."""
    (result,) = call.outputs
    kinds = REDUCE_OPS if result is None else commuting_with_cast(x.dtype, result.dtype)
    return like(x, partial=each(kinds, "k -> k"))


@rule_from([aten.copy_.default, aten.copy.default, aten.copy.out])
def COPY(x: TensorMeta, src: TensorMeta) -> Flow:
    """The source follows the target, over which it broadcasts."""
    names = labels(x.ndim)
    return Flow(
        [names, names[x.ndim - src.ndim :]],
        [names],
        partial=each(commuting_with_cast(src.dtype, x.dtype), "k, k -> k") + each(UNMOVED, "k, R -> k"),
    )


# -- fills -------------------------------------------------------------------------------------------------------

FILL = rule(aten.fill_.Scalar, "... -> ...", partial=each(UNMOVED, "k -> k"))

# Every reduction makes zero of zeros.
ZERO = rule(aten.zero_.default, "... -> ...", partial=ANY)


@rule_from(aten.fill_.Tensor)
def FILL_FROM(x: TensorMeta, value: TensorMeta) -> Flow:
    """The value is whole, or partial as the tensor is."""
    partials = ("*, * -> *",) if same_dtype(x, value) else ()
    names = labels(x.ndim)
    return Flow([names, ()], [names], partial=[*partials, *each(UNMOVED, "k, R -> k")])


@rule_from([aten.fill.Tensor, aten.fill.Tensor_out])
def FILLED_FROM(x: TensorMeta, value: TensorMeta) -> Flow:
    """The result is partial as the value is; what was in the tensor does not matter."""
    partials = ("R, * -> *",) if same_dtype(x, value) else ()
    names = labels(x.ndim)
    return Flow([names, ()], [names], partial=["*, R -> R", *partials])


# -- questions ---------------------------------------------------------------------------------------------------


def _true_on_all_ranks(local: LocalCall, x: torch.Tensor, other: torch.Tensor, *rest: Any) -> bool:
    mine = torch.tensor(local.call.op(x, other, *rest), dtype=torch.int32, device=x.device)
    return bool(local.comm.all_reduce(mine, "min", local.sharding(local.spec("self"))))


@rule_from([aten.equal.default, aten.allclose.default], lowering=_true_on_all_ranks)
def EQUAL(x: TensorMeta, other: TensorMeta) -> Flow:
    """Both operands in the same shards; true if it is true on all ranks."""
    if x.shape != other.shape:
        return Flow([None], [])
    names = labels(x.ndim)
    return Flow([names], [], lowered="*", scattered="*")


def _same_global_size(local: LocalCall, *_: Any) -> bool:
    x, other = local.call.operands
    return x is not None and other is not None and x.shape == other.shape


@rule_from(aten.is_same_size.default, lowering=_same_global_size)
def SAME_SIZE(x: TensorMeta, other: TensorMeta) -> Flow:
    """Any placements: the global shapes answer."""
    left, right = [f"x{d}" for d in range(x.ndim)], [f"y{d}" for d in range(other.ndim)]
    pairs = product(["R", *REDUCE_OPS, *left], ["R", *REDUCE_OPS, *right])
    return Flow([left, right], [], partial=[f"{a}, {b} ->" for a, b in pairs], lowered="*", scattered="*")


@rule_from(aten._new_zeros_with_same_feature_meta.default)
def ZEROS_THAT_LIE_AS(x: TensorMeta, other: TensorMeta, *, self_num_batch_dims: int = 0) -> Flow:
    """Zeros that lie as the other tensor does, on every rank, for the tangent of that tensor. Of the first tensor only
    the dtype counts, and the first dims where ``vmap`` goes over them.
    """
    batch, right = [f"b{d}" for d in range(self_num_batch_dims)], [f"y{d}" for d in range(other.ndim)]
    left = [*batch, *(f"x{d}" for d in range(x.ndim - self_num_batch_dims))]
    pairs = product(["R", *REDUCE_OPS, *left[len(batch) :]], ["R", *REDUCE_OPS, *right])
    rows = [f"{a}, {b} -> {'R' if b in REDUCE_OPS else b}" for a, b in pairs]
    return Flow([left, right], [[*batch, *right]], partial=rows)


IS_PINNED = rule(aten.is_pinned.default, "... ->", partial=["* ->"])

# Every rank needs the value.
VALUE = rule([aten._local_scalar_dense.default, aten._assert_async.default, aten._assert_async.msg], "R ->")

RULES = (
    SAME,
    TO_COPY,
    COPY,
    FILL,
    ZERO,
    FILL_FROM,
    FILLED_FROM,
    EQUAL,
    SAME_SIZE,
    ZEROS_THAT_LIE_AS,
    IS_PINNED,
    VALUE,
)
