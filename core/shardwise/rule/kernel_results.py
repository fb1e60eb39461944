"""What a device's kernel returns where torch's meta kernel says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from shardwise.kernel.signature import Call
from shardwise.kernel.spec import hinted_meta
from shardwise.kernel.tensor_meta import TensorMeta, memory_order
from shardwise.private_torch.fake import fake_strides

__all__ = ["strides_of_kernel"]


def strides_of_kernel(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """The metas of a call's results with the strides that the device's kernel gives them: a rule's ``results=``.

    Torch's meta kernel of ``convolution`` always returns row-major tensors. Torch's fake tensors know which kernel a
    device takes and which memory format it returns. Where every operand is row-major, so is every result.
    """
    operands = [meta for meta in call.operands if meta is not None]
    if all(memory_order(hinted_meta(meta)) == tuple(range(meta.ndim)) for meta in operands):
        return call.outputs

    def stated(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            meta = hinted_meta(value)
            return meta.shape, meta.stride, meta.dtype
        return value

    strides = fake_strides(call.op, {name: stated(value) for name, value in call.args.items()}, device_type)
    return [
        meta if meta is None or stride is None else evolve(meta, stride=_dense(meta, stride))
        for meta, stride in zip(call.outputs, strides, strict=True)
    ]


def _dense(meta: TensorMeta, stride: Sequence[int]) -> tuple[int, ...]:
    """Dense strides, symbols where the shape has some, in the memory order of strides that are numbers."""
    order = memory_order(evolve(hinted_meta(meta), stride=tuple(stride)))
    if not meta.is_symbolic:
        return tuple(stride)
    steps: list[Any] = [1] * meta.ndim
    step: Any = 1
    for d in reversed(order):
        steps[d] = step
        step = step * meta.shape[d]
    return tuple(steps)
