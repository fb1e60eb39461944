"""How a local tensor lies in memory: as the strides of its spec say.

Autograd's formulas and composite ops read the strides of the global tensor: where these say "contiguous" nothing is
copied, and the kernel that comes next reads the local memory as if it were. So a local tensor obeys three laws:

* its dims lie in memory in the order of the global strides;
* if the global tensor is dense (its elements fill its memory), the local tensor is dense;
* no dim is expanded (stride 0) that is not expanded in the global tensor.

With a global tensor of shape [4, 6] and strides (1, 4), a shard of shape [4, 3] has strides (1, 4), and (4, 1) would be
wrong. Dims of one element do not count, because their stride is never multiplied by anything but 0, with one exception:

* torch tells from all strides whether four or five dims are channels last, and its kernels refuse memory that is
  neither that nor row-major. So strides of such a local tensor never fall from the innermost dim to the outermost: one
  image of 16 channels and 4 x 4 points that lies as (16, 1, 64, 16) is given the strides (256, 1, 64, 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from shardwise.kernel.symbols import guess
from shardwise.kernel.tensor_meta import TensorMeta, memory_order

__all__ = ["alias", "dense_in_order", "in_order", "is_dense", "lies_as", "other_layout", "restrided"]


HAVE_MEMORY_FORMATS = (4, 5)
"""The numbers of dims for which torch knows the channels-last memory format."""


def other_layout(tensor: torch.Tensor) -> str:
    """The layout of a tensor that is not an array of numbers by strides: sparse, opaque, nested or quantized; else
    empty.
    """
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else ""


def lies_as(meta: TensorMeta, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a local tensor of this shape and stride (in elements) lies in memory as a global tensor's meta says."""
    sizes, steps = [guess(n) for n in shape], [guess(n) for n in stride]
    if 0 in sizes:
        return True
    if meta.is_symbolic:
        meta = TensorMeta([guess(n) for n in meta.shape], [guess(n) for n in meta.stride], meta.dtype)
    if tuple(sizes) == tuple(meta.shape) and tuple(steps) == tuple(meta.stride):
        return True  # torch has them so on one device
    order = [d for d in memory_order(meta) if sizes[d] > 1]
    expected = 1
    fills = True
    for d in reversed(order):
        fills = fills and steps[d] == expected
        expected *= sizes[d]
    if fills:
        return len(sizes) not in HAVE_MEMORY_FORMATS or _is_row_major(sizes, steps) or _only_rise(meta, sizes, steps)
    expanded = [d for d in order if meta.stride[d] == 0]
    if is_dense(meta) or any(steps[d] == 0 and d not in expanded for d in order):
        return False
    rest = [d for d in order if d not in expanded]
    return bool(expanded) or all(steps[outer] >= steps[inner] for outer, inner in pairwise(rest))


def _is_row_major(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    several = [step for n, step in zip(sizes, steps, strict=True) if n > 1]
    return all(outer > inner for outer, inner in pairwise(several))


def _only_rise(meta: TensorMeta, sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether no stride is smaller than what lies inside its dim takes up; torch asks the same of memory formats."""
    least = 0
    for d in reversed(memory_order(meta)):
        if steps[d] < least:
            return False
        least = steps[d] * sizes[d]
    return True


def is_dense(meta: TensorMeta) -> bool:
    """Whether the elements of a tensor fill its memory without a gap, each at a place of its own."""
    expected = 1
    for d in reversed(memory_order(meta)):
        if meta.shape[d] != 1:
            if meta.stride[d] != expected:
                return False
            expected *= meta.shape[d]
    return True


def in_order(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A local tensor as a global tensor's meta says: itself, a view if only dims of one element differ, else a copy."""
    view = restrided(tensor, meta)
    return dense_in_order(tensor, meta) if view is None else view


def restrided(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor | None:
    """A local tensor as a global tensor's meta says, without a copy: itself, or a view if only dims of one element
    differ; else None.
    """
    if lies_as(meta, tensor.shape, tensor.stride()):
        return tensor
    strides, expected = [0] * tensor.ndim, 1
    for d in reversed(memory_order(meta)):
        strides[d] = expected
        expected *= tensor.shape[d]
    if all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor.as_strided(tensor.shape, strides)
    return None


def dense_in_order(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy of a local tensor that is dense, with its dims in memory in the order of a global tensor's meta."""
    order = memory_order(meta)
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor object over the same memory. Unlike ``view_as``, it keeps the strides of dims of one element."""
    return tensor[...]
