"""The strides of results that torch computes element by element, as its ``TensorIterator`` chooses them on each device
(aten/src/ATen/TensorIterator.cpp).

Torch's meta kernels of many such ops are written in Python, and choose others where operands lie in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from shardwise.kernel.local_strides import is_dense
from shardwise.kernel.signature import ByType, Call
from shardwise.kernel.spec import guessed_meta
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule.kernel_results import dense_like

__all__ = ["iterated", "iterated_over", "iterates_over"]

_CHANNELS_LAST = (0, 2, 3, 1)
# Names of the numbers of which kernels make tensors without dims, as they are called in torch's schemas.
_OPERANDS = ("self", "other", "x", "n")
_NUMBER = TensorMeta((), (), torch.float32)


def iterated(call: Call, _device_type: str) -> Sequence[TensorMeta | None]:
    """The metas of the results of an elementwise call with the strides that kernels give them: a rule's ``results=``.

    It holds for kernels that leave their results to a ``TensorIterator`` over all operands, in their order.
    """
    return iterated_over(call, iterates_over(call))


def iterates_over(call: Call) -> list[TensorMeta]:
    """The operands of a call in their order, with those that are numbers."""
    numbers = (name for name in _OPERANDS if isinstance(call.args.get(name), ByType))
    named = dict(zip(call.operand_names, call.operands, strict=True)) | dict.fromkeys(numbers, _NUMBER)
    metas = (named.get(name) for name in (*call.args, *(name for name in named if name not in call.args)))
    return [meta for meta in metas if meta is not None]


def iterated_over(call: Call, operands: Sequence[TensorMeta]) -> Sequence[TensorMeta | None]:
    """:func:`iterated` for a kernel that iterates over these operands, in this order."""
    if call.out_operands or any(arg.written for arg in call.signature.args):
        return call.outputs
    numbers = [guessed_meta(meta) for meta in operands]
    if all(meta.stride == TensorMeta.contiguous(meta.shape, meta.dtype).stride for meta in numbers):
        return call.outputs
    return [
        meta if meta is None else evolve(meta, stride=dense_like(meta, _strides(guessed_meta(meta).shape, numbers)))
        for meta in call.outputs
    ]


def _strides(shape: Sequence[int], operands: Sequence[TensorMeta]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape, to which all operands are broadcast."""
    if all(tuple(meta.shape) == tuple(shape) for meta in operands):
        first = operands[0].stride
        if all(meta.is_contiguous for meta in operands):
            return _in_order(shape, range(len(shape)))
        if len(shape) == len(_CHANNELS_LAST) and all(_is_channels_last(meta) for meta in operands):
            return _in_order(shape, _CHANNELS_LAST)
        if all(is_dense(meta) and meta.stride == first for meta in operands):
            return tuple(first)
    return _in_order(shape, _order(shape, [_broadcast(meta, shape) for meta in operands]))


def _is_channels_last(meta: TensorMeta) -> bool:
    strides = _in_order(meta.shape, _CHANNELS_LAST)
    return all(n == 1 or a == b for n, a, b in zip(meta.shape, meta.stride, strides, strict=True))


def _in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose dims lie in memory in this order, from the outermost."""
    strides, step = [1] * len(shape), 1
    # Torch multiplies by a size of 0 unless the order is that of the shape.
    least = 1 if list(order) == list(range(len(shape))) else 0
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], least)
    return tuple(strides)


def _broadcast(meta: TensorMeta, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an operand that is expanded to a shape."""
    new = len(shape) - meta.ndim
    return (0,) * new + tuple(
        0 if own == 1 != n else step for own, n, step in zip(meta.shape, shape[new:], meta.stride, strict=True)
    )


def _order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """The dims from the outermost in memory to the innermost: sorted by insertion, since dims that are expanded in
    every operand compare with none, and the order then depends on how it is sorted.
    """
    inside_out = list(reversed(range(len(shape))))
    for at in range(1, len(shape)):
        moving = at
        for other in reversed(range(at)):
            comparison = _compare(shape, strides, inside_out[other], inside_out[moving])
            if comparison > 0:
                inside_out[other], inside_out[moving] = inside_out[moving], inside_out[other]
                moving = other
            elif comparison < 0:
                break
    return inside_out[::-1]


def _compare(shape: Sequence[int], strides: Sequence[Sequence[int]], one: int, other: int) -> int:
    """Whether one dim lies further outside than another (1), further inside (-1), or neither."""
    for steps in strides:
        if steps[one] == 0 or steps[other] == 0:
            continue
        if steps[one] != steps[other]:
            return 1 if steps[one] > steps[other] else -1
        if shape[one] > shape[other]:
            return 1
    return 0
