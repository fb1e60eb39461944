"""The contents of a tensor as one number, which ranks can compare without sending the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["device_digest", "digest", "octets", "traced_digest"]

_WORDS = 1 << 22  # read at a time: 32 MiB


def digest(tensor: Tensor) -> int:
    """A number of 64 bits that is the same for tensors with the same elements, bit by bit, in the same order.

    Another number means other elements. Of tensors that differ, about one pair in 2^64 has the same number; tensors
    that differ in one element never have. Computed on the tensor's device, and then read: the host waits for the
    device. A NaN counts with its bits, and so does the sign of zero.
    """
    return int(device_digest(tensor)) & 0xFFFFFFFFFFFFFFFF


def device_digest(tensor: Tensor) -> Tensor:
    """:func:`digest` as an int64 tensor without dims on the tensor's device: the host does not wait for it."""
    row = octets(tensor)
    total = torch.zeros((), dtype=torch.int64, device=row.device)
    for start in range(0, row.numel(), 8 * _WORDS):
        total += _sum(row[start : start + 8 * _WORDS], start // 8)
    return total


def traced_digest(tensor: Tensor) -> Tensor:
    """:func:`digest` for a graph that is being traced: an int64 tensor without dims."""
    return _sum(octets(tensor), 0)


def octets(tensor: Tensor) -> Tensor:
    """The bytes of all elements in row-major order, in a tensor of one dim."""
    row = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # Of a tensor of one element torch calls any stride contiguous, and only stride 1 may be seen as octets.
    return row.as_strided(row.shape, (1,)).view(torch.uint8)


def _sum(octets: Tensor, start: int) -> Tensor:
    """The sum over words of eight bytes, each mixed with its place, of which the first is ``start``."""
    words = torch.nn.functional.pad(octets, (0, -octets.numel() % 8)).view(torch.int64)
    places = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    return _mixed(words ^ (places * _GOLDEN)).sum()


def _mixed(values: Tensor) -> Tensor:
    """The finaliser of splitmix64: each bit of a result depends on all bits of the value. It is one to one."""
    values = (values ^ (values >> 30)) * _FIRST
    values = (values ^ (values >> 27)) * _SECOND
    return values ^ (values >> 31)


# The constants of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators"), as signed.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
