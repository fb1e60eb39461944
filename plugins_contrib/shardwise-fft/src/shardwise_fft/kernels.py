"""The transforms in a call of ``_fft_c2c``, ``_fft_r2c`` or ``_fft_c2r``, and how each runs on a shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from shardwise.rule import Call

__all__ = ["Kernel", "Stage", "stages"]

aten = torch.ops.aten


def _ints(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(dims)


@frozen
class Kernel:
    """A transform of one kind: ``c2c``, ``r2c`` (size ``n`` to ``n // 2 + 1`` where ``onesided``) or ``c2r``.

    ``normalization`` is torch's: 0 none, 1 by the root of the size, 2 by the size. All three multiply over dims, so a
    transform of several dims may be split by dims. ``size`` is the size that ``c2r`` makes.
    """

    kind: str
    normalization: int
    forward: bool = True
    onesided: bool = True
    size: int = 0

    def result_size(self, n: int) -> int:
        """The size of the last transformed dim afterwards."""
        if self.kind == "c2r":
            return self.size
        return n // 2 + 1 if self.kind == "r2c" and self.onesided else n

    def run(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """The transform of dims that are whole on this rank; torch's kernels refuse an empty tensor."""
        result: Tensor
        if not x.numel():
            shape = list(x.shape)
            shape[dims[-1]] = self.result_size(shape[dims[-1]])
            return x.new_empty(shape, dtype=x.dtype.to_real() if self.kind == "c2r" else x.dtype.to_complex())
        if self.kind == "c2c":
            result = aten._fft_c2c(x, dims, self.normalization, self.forward)
        elif self.kind == "r2c":
            result = aten._fft_r2c(x, dims, self.normalization, self.onesided)
        else:
            result = aten._fft_c2r(x, dims, self.normalization, self.size)
        return result


@frozen
class Stage:
    """Dims that one kernel transforms, in any order."""

    dims: tuple[int, ...] = field(converter=_ints)
    kernel: Kernel


def stages(call: Call) -> tuple[Stage, ...]:
    """The stages of a call, in the order in which they run.

    The last dim of a real transform is halved in the first stage, and restored in the last stage of the inverse.
    torch's kernels have this order; another one gives other values where the spectrum of a ``c2r`` is not Hermitian.
    """
    args = call.args
    ndim, norm = args["self"].ndim, args["normalization"]
    dims = [d % ndim for d in args["dim"]]
    if "forward" in args:
        return (Stage(dims, Kernel("c2c", norm, args["forward"])),)
    if "onesided" in args:
        halved = Stage(dims[-1:], Kernel("r2c", norm, onesided=args["onesided"]))
        return (halved, Stage(dims[:-1], Kernel("c2c", norm, forward=True)))
    halved = Stage(dims[-1:], Kernel("c2r", norm, size=args["last_dim_size"]))
    return (Stage(dims[:-1], Kernel("c2c", norm, forward=False)), halved)
