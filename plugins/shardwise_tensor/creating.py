"""New tensors with the shape, dtype or placement of another one, but not with its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardwise.rule import Flow, LocalCall, TensorMeta, labels, like, rule, rule_from
from shardwise_tensor.devices import stays_on_mesh

__all__ = ["RULES", "dense_strides"]

aten = torch.ops.aten

LIKE = rule(
    [
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.zeros_like.out,
        aten.ones_like.default,
        aten.ones_like.out,
        aten.full_like.default,
        aten.full_like.out,
        aten.fill.Scalar,
        aten.fill.Scalar_out,
        aten.zero.default,
        aten.zero.out,
    ],
    "... -> ...",
    partial=["* -> R"],
    local_args=stays_on_mesh,
)


def _local_size(local: LocalCall) -> Mapping[str, Any]:
    (result,) = local.outputs
    replaced = stays_on_mesh(local)
    return replaced if result is None else {**replaced, "size": local.local_shape(result)}


@rule_from(
    [
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.new_zeros.out,
        aten.new_ones.default,
        aten.new_ones.out,
        aten.new_full.default,
        aten.new_full.out,
    ],
    local_args=_local_size,
)
def NEW(x: TensorMeta, size: Sequence[int]) -> Flow:
    """As the input if the shapes agree; a complex input may differ in one dim. Else whole, from any placement."""
    if tuple(size) == tuple(x.shape):
        return like(x, partial=["* -> R"])
    # The gradient of a real Fourier transform pads a half spectrum with zeros along one dim, and it may be large. Sizes
    # of other tensors may agree by chance, and a whole tensor can be written in part.
    like_sizes = x.dtype.is_complex and len(size) == x.ndim
    same = [d for d in range(x.ndim) if like_sizes and size[d] == x.shape[d]]
    return _whole(x, len(size), same if len(same) == x.ndim - 1 else ())


def _whole(x: TensorMeta, ndim: int, same: Collection[int] = ()) -> Flow:
    """A result that is whole, but for the dims ``same``: these are sharded as in the input."""
    names = labels(x.ndim)
    result = [names[d] if d in same else None for d in range(ndim)]
    return Flow([names], [result], reduce={name: "R" for name in names if name}, partial=["* -> R"])


# -- between two values -------------------------------------------------------------------------------------------

# Between partial ends there are no steps.
STEPS = rule(
    [
        aten.linspace.Tensor_Scalar,
        aten.linspace.Tensor_Scalar_out,
        aten.linspace.Scalar_Tensor,
        aten.linspace.Scalar_Tensor_out,
        aten.logspace.Tensor_Scalar,
        aten.logspace.Tensor_Scalar_out,
        aten.logspace.Scalar_Tensor,
        aten.logspace.Scalar_Tensor_out,
    ],
    "R -> R",
    local_args=stays_on_mesh,
)
STEPS_BETWEEN = rule(
    [
        aten.linspace.Tensor_Tensor,
        aten.linspace.Tensor_Tensor_out,
        aten.logspace.Tensor_Tensor,
        aten.logspace.Tensor_Tensor_out,
    ],
    "R, R -> R",
    local_args=stays_on_mesh,
)


# -- with strides ------------------------------------------------------------------------------------------------


def dense_strides(size: Sequence[int], stride: Sequence[int], local: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a shard in the memory order of the whole; ``None`` if the whole has gaps or overlaps."""
    strides = [0] * len(size)
    whole_step = local_step = 1
    for d in sorted(range(len(size)), key=lambda d: (stride[d], size[d])):
        if size[d] > 1 and stride[d] != whole_step:
            return None
        strides[d] = local_step
        whole_step *= max(size[d], 1)
        local_step *= max(local[d], 1)
    return tuple(strides)


def _local_strides(local: LocalCall) -> Mapping[str, Any]:
    (result,) = local.outputs
    replaced = stays_on_mesh(local)
    if result is None or local.local_shape(result) == tuple(result.shape):
        return replaced
    shape = local.local_shape(result)
    return {**replaced, "size": shape, "stride": dense_strides(result.shape, local.arg("stride"), shape)}


@rule_from(aten.new_empty_strided.default, local_args=_local_strides)
def NEW_STRIDED(x: TensorMeta, size: Sequence[int], stride: Sequence[int]) -> Flow:
    """As the input if the shapes agree and the memory is dense, else whole."""
    if tuple(size) == tuple(x.shape) and dense_strides(size, stride, size) is not None:
        return like(x, partial=["* -> R"])
    return _whole(x, len(size))


RULES = (LIKE, NEW, NEW_STRIDED, STEPS, STEPS_BETWEEN)
