"""Zeros around a matrix: what a kernel wants that takes no other sizes than multiples of its tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["padded", "up"]


def up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def padded(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``tensor`` with zeros behind it along every dim up to these sizes; row-major, and itself where it is both."""
    if tuple(sizes) == tuple(tensor.shape):
        return tensor.contiguous()
    # Not functional.pad: it has no float8 kernel.
    found = tensor.new_zeros(tuple(sizes))
    found[tuple(slice(n) for n in tensor.shape)] = tensor
    return found
