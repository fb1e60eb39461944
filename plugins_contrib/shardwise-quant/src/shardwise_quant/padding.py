"""Zeros around a matrix, for a kernel that accepts only multiples of its tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["padded", "up"]


def up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def padded(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``tensor``, row-major, with zeros behind it along every dim up to these sizes; itself if nothing is to change."""
    if tuple(sizes) == tuple(tensor.shape):
        return tensor.contiguous()
    # Not functional.pad: it has no float8 kernel.
    wide = tensor.new_zeros(tuple(sizes))
    wide[tuple(slice(n) for n in tensor.shape)] = tensor
    return wide
