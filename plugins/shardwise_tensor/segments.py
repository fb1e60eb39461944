"""Runs of elements along one dim, each reduced to one element."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, Labels, TensorMeta, dim_of, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _labels(ndim: int, axis: int) -> Labels:
    return tuple(None if d <= axis else f"d{d}" for d in range(ndim))


@rule_from([aten.segment_reduce.default, aten.segment_reduce.out])
def SEGMENT_REDUCE(data: TensorMeta, *, axis: int = 0, call: Call) -> Flow:
    """The dims behind the segmented one pass; the lengths or offsets of segments are whole."""
    names = _labels(data.ndim, dim_of(axis, data.ndim))
    return Flow([names, *[None] * (len(call.operands) - 1)], [names])


@rule_from([aten._segment_reduce_backward.default, aten._segment_reduce_backward.out])
def SEGMENT_REDUCE_BACKWARD(
    grad: TensorMeta, output: TensorMeta, data: TensorMeta, *, axis: int = 0, call: Call
) -> Flow:
    """The dims behind the segmented one pass, together in all tensors."""
    names = _labels(data.ndim, dim_of(axis, data.ndim))
    return Flow([names, names, names, *[None] * (len(call.operands) - 3)], [names])


RULES = (SEGMENT_REDUCE, SEGMENT_REDUCE_BACKWARD)
