"""In which order a transform of the CPU writes its result: transformed dims are innermost, in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from shardwise.rule import Call, TensorMeta

__all__ = ["strides_of_transform"]

FEW = 2
"""The size of each dim of the operand that the kernel is asked with: dims of size 1 would have no order."""


def strides_of_transform(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """A rule's ``results=``. Torch's meta kernels of these ops say another order than its kernels of a CPU, which
    depends on the library that torch was built with. So the kernel is asked, with a few elements.
    """
    operand: TensorMeta = call.args["self"]
    if device_type != "cpu" or call.out_operands or operand.is_symbolic or 0 in operand.shape:
        return call.outputs
    args = {name: FEW if name == "last_dim_size" else value for name, value in call.args.items()}
    args["self"] = _few(operand)
    strides = call.op(**args).stride()
    order = sorted(range(operand.ndim), key=lambda d: -strides[d])
    return [None if meta is None else evolve(meta, stride=_dense(meta, order)) for meta in call.outputs]


def _few(meta: TensorMeta) -> torch.Tensor:
    """A small tensor whose strides are in the order of these strides, equal and zero where these are."""
    steps = {step: FEW**k for k, step in enumerate(sorted({step for step in meta.stride if step}))}
    numbers = torch.ones(FEW**meta.ndim, dtype=meta.dtype, device="cpu")
    return numbers.as_strided((FEW,) * meta.ndim, [steps.get(step, 0) for step in meta.stride])


def _dense(meta: TensorMeta, order: list[int]) -> tuple[int, ...]:
    return torch.empty_permuted(meta.shape, order, device="meta").stride()
