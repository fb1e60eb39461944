"""Between numbers and their float8 values, as one operator each: what torchao leaves whole in exported programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.rule import Flow, LocalCall, TensorMeta, rule_from

__all__ = ["DEQUANTIZE", "QUANTIZE"]

ao = torch.ops.torchao


def _on_shard(local: LocalCall, tensor: torch.Tensor, scale: torch.Tensor, _: Any) -> torch.Tensor:
    """The op, but for a shard without elements: torchao divides by its size."""
    meta = local.call.outputs[0]
    assert meta is not None
    if not tensor.numel():
        return torch.empty_like(tensor, dtype=meta.dtype)
    result: torch.Tensor = local.call.op(tensor, scale, meta.dtype)  # the default of the schema is a number
    return result


def _by_blocks(tensor: TensorMeta, scale: TensorMeta) -> Flow:
    """Every dim that the scales do not cut into blocks, and the others between blocks.

    Elements that share a scale are a block of ``size of the tensor / size of the scales`` along each dim.
    """
    if not scale.shape or scale.numel == 1:  # one scale for all
        names = tuple(f"d{dim}" for dim in range(tensor.ndim))
        return Flow([names, [None] * scale.ndim], [names], lowered="*", scattered="*")
    if not _divide(tensor.shape, scale.shape):
        return Flow([None, None], [None])  # torchao refuses it
    dims: list[Any] = []
    scales: list[str | None] = []
    for dim, (size, blocks) in enumerate(zip(tensor.shape, scale.shape, strict=True)):
        name = f"d{dim}"
        is_cut = 1 < blocks < size
        dims.append(((name, blocks), (f"{name}'", size // blocks)) if is_cut else name)
        scales.append(name if blocks == size or is_cut else None)
    return Flow([dims, scales], [dims], lowered="*", scattered="*")


def _divide(shape: Sequence[int], by: Sequence[int]) -> bool:
    return len(shape) == len(by) and all(b and n % b == 0 for n, b in zip(shape, by, strict=True))


@rule_from(ao.quantize_affine_float8_non_decomposed.default, lowering=_on_shard)
def QUANTIZE(tensor: TensorMeta, scale: TensorMeta) -> Flow:
    """Each element by its block's scale; blocks stay together."""
    return _by_blocks(tensor, scale)


@rule_from(ao.dequantize_affine_float8_non_decomposed.default, lowering=_on_shard)
def DEQUANTIZE(tensor: TensorMeta, scale: TensorMeta) -> Flow:
    """Each element by its block's scale; blocks stay together."""
    return _by_blocks(tensor, scale)
