"""The meta of a tensor: global shape, stride and dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from attrs import field, frozen

from shardwise.kernel.mesh import ints
from shardwise.kernel.symbols import guess, is_symbolic

__all__ = ["TensorMeta", "dtype_name", "memory_order", "unexpanded"]


def _as_size(sizes: Sequence[int]) -> torch.Size:
    return torch.Size(sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name used in tables: ``f32``, ``bf16``, ``i64``, ``bool``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


@frozen(cache_hash=True)
class TensorMeta:
    """Global shape, stride (in elements) and dtype of a tensor."""

    shape: torch.Size = field(converter=_as_size)
    stride: tuple[int, ...] = field(converter=ints)
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_symbolic(self) -> bool:
        """Whether a size or stride is a ``torch.SymInt`` (under ``torch.compile`` with dynamic shapes)."""
        return is_symbolic(self.shape) or is_symbolic(self.stride)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major without gaps, as ``Tensor.is_contiguous``; of symbols, for their hints."""
        sizes = [guess(n) for n in self.shape]
        rows = TensorMeta.contiguous(sizes, self.dtype).stride
        return 0 in sizes or all(n == 1 or guess(a) == b for n, a, b in zip(sizes, self.stride, rows, strict=True))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
        """The meta of a new row-major tensor."""
        stride: list[int] = []
        step = 1
        for n in reversed(shape):
            stride.append(step)
            step *= max(n, 1)
        return cls(shape, stride[::-1], dtype)

    def to_meta_tensor(self) -> torch.Tensor:
        """A tensor on the meta device with this shape, stride and dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def memory_order(meta: TensorMeta) -> tuple[int, ...]:
    """The tensor dims from the outermost in memory to the innermost.

    For an expanded tensor (a stride of 0 over several elements): in the order of its shape. A transposed matrix of
    shape (2, 3) and stride (1, 2) has the order (1, 0).
    """
    dims = range(meta.ndim)
    several = [d for d in dims if meta.shape[d] > 1]
    is_row_major = all(meta.stride[a] >= meta.stride[b] for a, b in pairwise(several))
    if is_row_major or any(meta.stride[d] == 0 for d in several):
        return tuple(dims)
    return tuple(sorted(dims, key=lambda d: (-meta.stride[d], d)))


def unexpanded(meta: TensorMeta) -> TensorMeta:
    """The meta of a copy of a tensor: that of a row-major one if a dim was expanded, else the same.

    The parts of an expanded tensor that are sent or sliced have memory of their own, and so has the tensor that they
    make.
    """
    if not meta.is_symbolic and any(n > 1 and step == 0 for n, step in zip(meta.shape, meta.stride, strict=True)):
        return TensorMeta.contiguous(meta.shape, meta.dtype)
    return meta
