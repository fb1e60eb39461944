"""What a device's kernel returns where torch's meta kernel says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import evolve

from shardwise.kernel.local_strides import HAVE_MEMORY_FORMATS
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import guessed_meta
from shardwise.kernel.tensor_meta import TensorMeta, memory_order
from shardwise.private_torch.fake import fake_strides

__all__ = ["dense_like", "in_memory_format", "like_operand", "row_major", "strides_of_kernel"]


def strides_of_kernel(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """The metas of a call's results with the strides that the device's kernel gives them: a rule's ``results=``.

    Torch's meta kernel of ``convolution`` always returns row-major tensors. Torch's fake tensors know which kernel a
    device takes and which memory format it returns. Where every operand is row-major, so is every result.
    """
    operands = [meta for meta in call.operands if meta is not None]
    if all(memory_order(guessed_meta(meta)) == tuple(range(meta.ndim)) for meta in operands):
        return call.outputs

    def stated(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            meta = guessed_meta(value)
            return meta.shape, meta.stride, meta.dtype
        return value

    strides = fake_strides(call.op, {name: stated(value) for name, value in call.args.items()}, device_type)
    return [
        meta if meta is None or stride is None else evolve(meta, stride=dense_like(meta, stride))
        for meta, stride in zip(call.outputs, strides, strict=True)
    ]


def dense_like(meta: TensorMeta, stride: Sequence[int]) -> tuple[int, ...]:
    """Dense strides, symbols where the shape has some, in the memory order of strides that are numbers."""
    if not meta.is_symbolic:
        return tuple(stride)
    return _steps(meta, memory_order(evolve(guessed_meta(meta), stride=tuple(stride))))


def _rows(meta: TensorMeta) -> tuple[Any, ...]:
    """The strides of a row-major tensor. No question is asked about symbols."""
    return _steps(meta, range(meta.ndim)) if meta.is_symbolic else TensorMeta.contiguous(meta.shape, meta.dtype).stride


def _steps(meta: TensorMeta, order: Iterable[int]) -> tuple[Any, ...]:
    """The strides of a dense tensor whose dims lie in memory in this order, from the outermost."""
    steps: list[Any] = [1] * meta.ndim
    step: Any = 1
    for d in reversed(tuple(order)):
        steps[d] = step
        step = step * meta.shape[d]
    return tuple(steps)


def row_major(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Row-major results: a rule's ``results=`` for an op whose kernel on the CPU returns them whatever the strides of
    its operands are, where torch's meta kernel follows these.
    """
    if device_type != "cpu" or call.out_operands:
        return call.outputs
    return [None if meta is None else evolve(meta, stride=_rows(meta)) for meta in call.outputs]


def like_operand(call: Call, name: str) -> Sequence[TensorMeta | None]:
    """Results with the strides that ``torch.empty_like`` gives them for an operand of their shape, on every device."""
    operand: TensorMeta = call.args[name]
    like = TensorMeta.of(torch.empty_like(guessed_meta(operand).to_meta_tensor()))
    return [None if meta is None else evolve(meta, stride=dense_like(meta, like.stride)) for meta in call.outputs]


def in_memory_format(call: Call, device_type: str, like: TensorMeta | None = None) -> Sequence[TensorMeta | None]:
    """Results in the memory format of an operand, the first unless another is given: channels last where that is, and
    row-major elsewhere. As :func:`row_major`, for the CPU.
    """
    results = row_major(call, device_type)
    operand = like or next(meta for meta in call.operands if meta is not None)
    channels_last = (0, *range(2, operand.ndim), 1)
    if (
        device_type != "cpu"
        or call.out_operands
        or operand.ndim not in HAVE_MEMORY_FORMATS
        or memory_order(guessed_meta(operand)) != channels_last
    ):
        return results
    return [
        meta if meta is None or meta.ndim != operand.ndim else evolve(meta, stride=_steps(meta, channels_last))
        for meta in results
    ]
