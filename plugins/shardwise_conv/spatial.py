"""Convolution over sharded positions, forward and backward, by halo exchange.

Each rank fetches the positions that its own outputs reach, convolves them without padding, and in the backward returns
the gradients of what it fetched. Any kernel, stride, padding and dilation; transposed ones too; uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn.functional import pad

from shardwise.rule import LocalCall
from shardwise.spec import TensorSpec
from shardwise_conv.halo import Exchange, Reach, Run, fetched, reached, returned, runs

__all__ = ["convolve", "differentiate"]

aten = torch.ops.aten

_BATCH_AND_CHANNEL = 2


@frozen
class _Slide:
    """What a convolution does along one dim."""

    dim: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool

    @property
    def width(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def reach(self, outputs: Run, size: int) -> Reach:
        """The inputs of some outputs."""
        if not len(outputs):
            return reached(0, 0, size)
        if not self.transposed:
            first = outputs.start * self.stride - self.padding
            return reached(first, (outputs.stop - 1) * self.stride - self.padding + self.width, size)
        first = -((self.width - 1 - outputs.start - self.padding) // self.stride)
        inside = reached(first, (outputs.stop - 1 + self.padding) // self.stride + 1, size).inside
        return Reach(inside, 0, 0)

    def cut(self, outputs: Run, reach: Reach) -> tuple[int, int]:
        """Where a transposed convolution of what is reached, without padding, has these outputs."""
        start = outputs.start + self.padding - reach.inside.start * self.stride
        return start, start + len(outputs)


@frozen
class _Dim:
    """One sharded dim of one rank's call."""

    slide: _Slide
    exchange: Exchange
    reach: Reach
    outputs: Run


def _at(values: Sequence[int], i: int) -> int:
    return values[i] if len(values) > 1 else values[0]


def _sharded(local: LocalCall, x: TensorSpec, made: TensorSpec) -> tuple[_Dim, ...]:
    """The dims of positions that are sharded, with what is exchanged along each."""
    arg = local.arg
    found = []
    for i in range(x.ndim - _BATCH_AND_CHANNEL):
        dim = i + _BATCH_AND_CHANNEL
        mesh_dims = local.sharding(x, dim)
        if not mesh_dims:
            continue
        settings = (_at(arg(name), i) for name in ("stride", "padding", "dilation"))
        slide = _Slide(dim, arg("weight").shape[dim], *settings, arg("transposed"))
        held, outputs = runs(local, x, dim, mesh_dims), runs(local, made, dim, mesh_dims)
        reaches = [slide.reach(run, x.shape[dim]) for run in outputs]
        at = 0
        for m in mesh_dims:
            at = at * x.mesh_shape[m] + local.coordinate[m]
        exchange = Exchange(dim, mesh_dims, tuple(held), tuple(reach.inside for reach in reaches), at)
        found.append(_Dim(slide, exchange, reaches[at], outputs[at]))
    return tuple(found)


def _of_forward(local: LocalCall) -> tuple[_Dim, ...]:
    made = local.outputs[0]
    assert made is not None
    return _sharded(local, local.spec("input"), made)


def _of_backward(local: LocalCall) -> tuple[_Dim, ...]:
    return _sharded(local, local.spec("input"), local.spec("grad_output"))


def _amounts(ndim: int, of_dim: Mapping[int, tuple[int, int]]) -> list[int]:
    """The argument of ``pad``: last dim first."""
    return [n for dim in range(ndim - 1, 1, -1) for n in of_dim.get(dim, (0, 0))]


def _window(local: LocalCall, x: Tensor, dims: Sequence[_Dim]) -> Tensor:
    """What this rank's outputs reach, zeros beyond the input included."""
    for dim in dims:
        x = fetched(local, x, dim.exchange)
    return pad(x, _amounts(x.ndim, {d.slide.dim: (d.reach.before, d.reach.after) for d in dims}))


def _unpadded(values: Sequence[int], dims: Sequence[_Dim], count: int) -> list[int]:
    """A setting by dim, zero for the sharded ones: what they need of it is in the window."""
    sharded = {d.slide.dim - _BATCH_AND_CHANNEL for d in dims}
    return [0 if i in sharded else _at(values, i) for i in range(count)]


@frozen
class _Settings:
    """The arguments of the local convolution of a window."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def of_window(self, dims: Sequence[_Dim], count: int) -> _Settings:
        return evolve(
            self,
            padding=_unpadded(self.padding, dims, count),
            output_padding=_unpadded(self.output_padding, dims, count),
        )

    def listed(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


def _cuts(made: Tensor, dims: Sequence[_Dim]) -> list[int]:
    """How a transposed convolution of a window is cut, or filled up, to this rank's outputs."""
    found = {}
    for dim in dims:
        start, stop = dim.slide.cut(dim.outputs, dim.reach)
        found[dim.slide.dim] = (-start, stop - made.shape[dim.slide.dim])
    return _amounts(made.ndim, found)


def convolve(
    local: LocalCall, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, out: Tensor | None = None
) -> Tensor:
    """``convolution`` of shards of positions, batch, channels and groups."""
    made = local.outputs[0]
    assert made is not None
    dims = local.once(_of_forward)
    window = _window(local, x, dims)
    shape = local.local_shape(made)
    inner = _Settings(*settings).of_window(dims, x.ndim - _BATCH_AND_CHANNEL)
    if 0 in (*shape, *window.shape[_BATCH_AND_CHANNEL:]):
        result = x.new_zeros(shape)
    else:
        result = aten.convolution.default(window, weight, None if inner.transposed else bias, *inner.listed())
        if inner.transposed:
            result = pad(result, _cuts(result, dims))
    if bias is not None and (inner.transposed or not window.numel()):
        result = result + bias.view(-1, *[1] * (x.ndim - _BATCH_AND_CHANNEL))
    return result if out is None else out.copy_(result)


def differentiate(
    local: LocalCall, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """``convolution_backward`` of shards of positions, batch, channels and groups."""
    *settings, (by_input, by_weight, by_bias) = rest
    dims = local.once(_of_backward)
    inner = _Settings(*settings).of_window(dims, x.ndim - _BATCH_AND_CHANNEL)
    window = _window(local, x, dims) if by_weight else _blank(x, dims)
    first, second = _gradients(gradient, window, weight, inner, dims, (by_input, by_weight))
    if first is not None:
        for dim in reversed(dims):
            first = first.narrow(dim.slide.dim, dim.reach.before, len(dim.reach.inside))
        for dim in reversed(dims):
            first = returned(local, first, dim.exchange)
    over = [d for d in range(x.ndim) if d != 1]
    return first, second, gradient.sum(over) if by_bias else None


def _blank(x: Tensor, dims: Sequence[_Dim]) -> Tensor:
    """Something of the window's shape, where its values do not matter."""
    shape = list(x.shape)
    for dim in dims:
        shape[dim.slide.dim] = dim.reach.before + len(dim.reach.inside) + dim.reach.after
    return x.new_zeros(shape)


def _gradients(
    gradient: Tensor, window: Tensor, weight: Tensor, inner: _Settings, dims: Sequence[_Dim], mask: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by the window and by the weight."""
    if not gradient.numel() or not window.numel():
        parts = (torch.zeros_like(window), torch.zeros_like(weight))
        return parts[0] if mask[0] else None, parts[1] if mask[1] else None
    if inner.transposed:
        gradient = _filled_up(gradient, window, weight, dims, inner)
    found = aten.convolution_backward.default(gradient, window, weight, None, *inner.listed(), [*mask, False])
    return found[0], found[1]


def _filled_up(gradient: Tensor, window: Tensor, weight: Tensor, dims: Sequence[_Dim], inner: _Settings) -> Tensor:
    """The gradient by all outputs of a window, where this rank's are some of them."""
    amounts = {}
    for dim in dims:
        at, slide = dim.slide.dim, dim.slide
        whole = (window.shape[at] - 1) * slide.stride + slide.width
        start, stop = slide.cut(dim.outputs, dim.reach)
        amounts[at] = (start, whole - stop)
    return pad(gradient, _amounts(gradient.ndim, amounts))
