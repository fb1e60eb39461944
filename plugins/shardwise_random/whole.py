"""Draws by torch's generators: every rank draws the whole tensor and keeps its part.

So a program on a mesh draws the numbers that torch draws on one device. torch's generators give values by position in
memory, so the draw must have the global shape and strides. Generators that have the same state on all ranks before a
draw have the same state after it. Each draw costs the time and memory of the whole tensor on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import LocalCall, Shard, TensorMeta, TensorSpec

__all__ = ["gather", "like_whole", "part", "rehearse"]


def like_whole(meta: TensorMeta, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor of the global shape and strides."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype or meta.dtype, device=device)


def part(local: LocalCall, spec: TensorSpec, whole: Tensor) -> Tensor:
    """A view of the part of a whole tensor that this rank holds under a spec."""
    for dim, (start, size) in enumerate(zip(local.offset(spec), local.local_shape(spec), strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def gather(local: LocalCall, name: str, tensor: Any) -> Any:
    """The whole of an operand, by communication; a value that is not a tensor is returned as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    for mesh_dim, placement in reversed(list(enumerate(local.spec(name).placements))):
        if isinstance(placement, Shard):
            tensor = torch.cat(local.comm.all_gather(tensor, mesh_dim), placement.dim)
    return tensor


def rehearse(local: LocalCall, **operands: Any) -> None:
    """Issue the collectives of a draw by torch's generators. The operands are on the meta device: nothing is drawn."""
    if local.torch_draws:
        for name, tensor in operands.items():
            gather(local, name, tensor)
