"""Draws of the whole tensor on every rank, of which each rank keeps its part.

This is what makes a program on a mesh draw one device's numbers: torch's generators give values by their place in
memory, so the draw must have the global shape and strides, and ranks whose generators are in one state stay in one
state. The price is time and memory of the whole tensor on every rank, for as long as the draw takes.
"""

from __future__ import annotations

import torch

from shardwise.rule import LocalCall
from shardwise.spec import TensorMeta, TensorSpec

__all__ = ["like_whole", "part"]


def like_whole(meta: TensorMeta, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor of the global shape and strides."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype or meta.dtype, device=device)


def part(local: LocalCall, spec: TensorSpec, whole: torch.Tensor) -> torch.Tensor:
    """A view of the part of a whole tensor that this rank holds under a spec."""
    for dim, (start, size) in enumerate(zip(local.offset(spec), local.local_shape(spec), strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
