"""How a write to a view reaches its base, for views that had to be copies.

Each function returns the whole base with the values of one of the view op's results in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["UNDO"]

aten = torch.ops.aten


def _reshaped(base: Tensor, value: Tensor, _: int, *__: Any) -> Tensor:
    return value.reshape(base.shape)


def _select(base: Tensor, value: Tensor, _: int, dim: int, index: int) -> Tensor:
    return torch.select_scatter(base, value, dim, index)


def _slice(
    base: Tensor, value: Tensor, _: int, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    return torch.slice_scatter(base, value, dim, start, end, step)


def _unbind(base: Tensor, value: Tensor, index: int, dim: int = 0) -> Tensor:
    return torch.select_scatter(base, value, dim, index)


def _split(base: Tensor, value: Tensor, index: int, size: int, dim: int = 0) -> Tensor:
    return torch.slice_scatter(base, value, dim, index * size, index * size + value.shape[dim])


def _split_with_sizes(base: Tensor, value: Tensor, index: int, sizes: Sequence[int], dim: int = 0) -> Tensor:
    start = list(accumulate(sizes, initial=0))[index]
    return torch.slice_scatter(base, value, dim, start, start + sizes[index])


def _as_strided(
    base: Tensor, value: Tensor, _: int, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    return torch.as_strided_scatter(base, value, size, stride, offset)


def _diagonal(base: Tensor, value: Tensor, _: int, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return torch.diagonal_scatter(base, value, offset, dim1, dim2)


def _unfold(base: Tensor, value: Tensor, _: int, dimension: int, size: int, step: int) -> Tensor:
    """Of the windows but the last, what the next one does not overwrite, and what lies between them; then the last."""
    if size == 0 or base.ndim == 0:
        return value.reshape(base.shape) if size else base
    dim = dimension % base.ndim
    before = value.shape[dim] - 1
    last = before * step
    starts = value.narrow(dim, 0, before).narrow(-1, 0, min(size, step)).movedim(-1, dim + 1)
    if step > size:
        between = torch.unflatten(base.narrow(dim, 0, last), dim, (before, step)).narrow(dim + 1, size, step - size)
        starts = torch.cat([starts, between], dim + 1)
    rest = base.narrow(dim, last + size, base.shape[dim] - last - size)
    return torch.cat([starts.flatten(dim, dim + 1), value.select(dim, -1).movedim(-1, dim), rest], dim)


def _as_dtype(base: Tensor, value: Tensor, _: int, *__: Any) -> Tensor:
    return value.contiguous().view(base.dtype)


def _as_complex(base: Tensor, value: Tensor, _: int) -> Tensor:
    return torch.view_as_complex(value.contiguous())


def _as_real(base: Tensor, value: Tensor, _: int) -> Tensor:
    return torch.view_as_real(value.resolve_conj())


def _resize(base: Tensor, value: Tensor, _: int, *__: Any, **___: Any) -> Tensor:
    if value.numel() <= base.numel():
        return torch.as_strided_scatter(base, value, value.shape, value.stride())
    line = (base.numel(),), (1,)
    return torch.as_strided_scatter(base, value.as_strided(*line), *line)


UNDO: Mapping[Any, Callable[..., Tensor]] = {
    aten._reshape_alias.default: _reshaped,
    aten.as_strided.default: _as_strided,
    aten.diagonal.default: _diagonal,
    aten.resize.default: _resize,
    aten.resize_as.default: _resize,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unbind.int: _unbind,
    aten.unfold.default: _unfold,
    aten.unsqueeze.default: _reshaped,
    aten.view.default: _reshaped,
    aten.view.dtype: _as_dtype,
    aten.view_as_complex.default: _as_real,
    aten.view_as_real.default: _as_complex,
}
