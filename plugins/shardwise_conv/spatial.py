"""Convolution over sharded positions, forward and backward, by halo exchange.

Each rank fetches the positions that its own outputs reach and convolves them without padding. In the backward it
returns the gradients of what it fetched. It serves any kernel, stride, padding, dilation and shards, transposed
convolutions included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn.functional import pad

from shardwise.rule import LocalCall
from shardwise_conv.windows import Slide, Sliding, amounts, blank, give_back, setting, sliding, window

__all__ = ["convolve", "differentiate"]

aten = torch.ops.aten

_BATCH_AND_CHANNEL = 2


def _slides(local: LocalCall) -> list[Slide]:
    arg, kernel = local.arg, local.arg("weight").shape[_BATCH_AND_CHANNEL:]
    return [
        Slide(
            i + _BATCH_AND_CHANNEL,
            size,
            setting(arg("stride"), i),
            setting(arg("padding"), i),
            setting(arg("dilation"), i),
            arg("transposed"),
        )
        for i, size in enumerate(kernel)
    ]


def _of_forward(local: LocalCall) -> tuple[Sliding, ...]:
    result = local.outputs[0]
    assert result is not None
    return sliding(local, local.spec("input"), result, _slides(local))


def _of_backward(local: LocalCall) -> tuple[Sliding, ...]:
    return sliding(local, local.spec("input"), local.spec("grad_output"), _slides(local))


def _unpadded(values: Sequence[int], dims: Sequence[Sliding], count: int) -> list[int]:
    """A setting by dim. It is zero for the sharded dims, whose window already includes the padding."""
    sharded = {d.slide.dim - _BATCH_AND_CHANNEL for d in dims}
    return [0 if i in sharded else setting(values, i) for i in range(count)]


@frozen
class _Settings:
    """The arguments of the local convolution of a window."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def of_window(self, dims: Sequence[Sliding], count: int) -> _Settings:
        return evolve(
            self,
            padding=_unpadded(self.padding, dims, count),
            output_padding=_unpadded(self.output_padding, dims, count),
        )

    def listed(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


def convolve(
    local: LocalCall, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, out: Tensor | None = None
) -> Tensor:
    """``convolution`` of shards of positions, batch, channels and groups."""
    spec = local.outputs[0]
    assert spec is not None
    dims = local.once(_of_forward)
    reached = window(local, x, dims)
    shape = local.local_shape(spec)
    inner = _Settings(*settings).of_window(dims, x.ndim - _BATCH_AND_CHANNEL)
    if 0 in (*shape, *reached.shape[_BATCH_AND_CHANNEL:]):
        result = x.new_zeros(shape)
    else:
        result = aten.convolution.default(reached, weight, None if inner.transposed else bias, *inner.listed())
        if inner.transposed:
            edges = {}
            for dim in dims:
                start, stop = dim.slide.cut(dim.outputs, dim.reach)
                edges[dim.slide.dim] = (-start, stop - result.shape[dim.slide.dim])
            result = pad(result, amounts(result.ndim, edges))  # cuts where an amount is negative
    if bias is not None and (inner.transposed or not reached.numel()):
        result = result + bias.view(-1, *[1] * (x.ndim - _BATCH_AND_CHANNEL))
    return result if out is None else out.copy_(result)


def differentiate(
    local: LocalCall, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """``convolution_backward`` of shards of positions, batch, channels and groups."""
    *settings, (by_input, by_weight, by_bias) = rest
    dims = local.once(_of_backward)
    inner = _Settings(*settings).of_window(dims, x.ndim - _BATCH_AND_CHANNEL)
    reached = window(local, x, dims) if by_weight else blank(x, dims)
    first, second = _gradients(gradient, reached, weight, inner, dims, (by_input, by_weight))
    if first is not None:
        first = give_back(local, first, dims)
    over = [d for d in range(x.ndim) if d != 1]
    return first, second, gradient.sum(over) if by_bias else None


def _gradients(
    gradient: Tensor,
    reached: Tensor,
    weight: Tensor,
    inner: _Settings,
    dims: Sequence[Sliding],
    mask: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by the window and by the weight, each if the mask asks for it."""
    if not gradient.numel() or not reached.numel():
        parts = (torch.zeros_like(reached), torch.zeros_like(weight))
        return parts[0] if mask[0] else None, parts[1] if mask[1] else None
    if inner.transposed:
        gradient = _filled_up(gradient, reached, weight, dims, inner)
    by_window, by_weight, _ = aten.convolution_backward.default(
        gradient, reached, weight, None, *inner.listed(), [*mask, False]
    )
    return by_window, by_weight


def _filled_up(gradient: Tensor, reached: Tensor, weight: Tensor, dims: Sequence[Sliding], inner: _Settings) -> Tensor:
    """The gradient by all outputs of a window: zero for those that are not this rank's."""
    edges = {}
    for dim in dims:
        at, slide = dim.slide.dim, dim.slide
        whole = (reached.shape[at] - 1) * slide.stride + slide.width
        start, stop = slide.cut(dim.outputs, dim.reach)
        edges[at] = (start, whole - stop)
    return pad(gradient, amounts(gradient.ndim, edges))
