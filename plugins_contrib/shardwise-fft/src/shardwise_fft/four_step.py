"""The four-step algorithm: all ranks share one long transform, where there are fewer lines than ranks.

A transform of size ``n1 * n2`` is one of size ``n1``, a multiplication by roots of unity, and one of size ``n2``, with
transpositions between them (D. H. Bailey, "FFTs in external or hierarchical memory", 1990). Three all-to-alls; no rank
ever holds more than its share.
"""

from __future__ import annotations

import math

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwise.rule import LocalCall
from shardwise_fft.kernels import Kernel
from shardwise_fft.ranks import Ranks
from shardwise_fft.steps import Swap, from_lines, lines_of

__all__ = ["FourStep", "factors"]


def factors(size: int, ranks: int, kernel: Kernel) -> tuple[int, int] | None:
    """``n1 * n2 == size``, both multiples of the number of ranks and as close as possible, or ``None``.

    ``None`` as well for a transform that makes or takes half a spectrum.
    """
    whole = kernel.kind == "c2c" or (kernel.kind == "r2c" and not kernel.onesided)
    if not whole or size % ranks**2:
        return None
    left = size // ranks**2
    small = next(n for n in range(math.isqrt(left), 0, -1) if left % n == 0)
    return ranks * small, size // (ranks * small)


@frozen
class FourStep:
    """Transform a dim that the ranks of ``over`` shard evenly, and leave it so. ``by`` is a result of :func:`factors`.

    An element ``j`` of a line is ``j1 * n2 + j2``, one of the result is ``k1 + n1 * k2``; the transforms are over
    ``j1`` and ``j2``.
    """

    over: Ranks
    dim: int
    kernel: Kernel
    by: tuple[int, int]

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`shardwise_fft.steps.Step`."""
        n1, n2 = self.by
        lines = lines_of(x, self.dim)
        part = evolve(self.kernel, kind="c2c")
        y = lines.to(x.dtype.to_complex()).reshape(len(lines), n1 // self.over.count, n2)
        y = self._swapped(local, y, 1, 2)
        y = part.run(y, (1,)) * _roots(y, n1 * n2, self.over.here, forward=self.kernel.forward)
        y = self._swapped(local, y, 2, 1)
        y = part.run(y, (2,))
        y = self._swapped(local, y, 1, 2)
        return from_lines(y.transpose(1, 2).reshape(len(lines), n1 * n2 // self.over.count), x, self.dim)

    def _swapped(self, local: LocalCall, y: Tensor, dim: int, into: int) -> Tensor:
        """``y`` with ``into`` sharded in place of ``dim``."""
        return Swap(self.over, dim, into, y.shape[dim] * self.over.count).run(local, y)


def _roots(x: Tensor, size: int, rank: int, *, forward: bool) -> Tensor:
    """``exp(-+ 2 pi i j2 k1 / size)`` for all ``k1`` and this rank's ``j2``, computed in double precision."""
    _, n1, here = x.shape
    k1 = torch.arange(n1, device=x.device, dtype=torch.float64)
    j2 = torch.arange(here, device=x.device, dtype=torch.float64) + rank * here
    angles = torch.outer(k1, j2) * ((-2 if forward else 2) * math.pi / size)
    return torch.polar(torch.ones_like(angles), angles).to(x.dtype)
