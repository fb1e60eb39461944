"""Pooling over sharded positions, forward and backward, by halo exchange.

Maxima need no more than their windows; where each was found counts in the whole plane. Averages divide by how many
positions of the whole plane a window covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from shardwise.rule import LocalCall
from shardwise_conv.halo import Run
from shardwise_conv.windows import Slide, Sliding, blank, give_back, setting, sliding, window

__all__ = ["average", "average_backward", "largest", "largest_backward"]

_POSITIONS = {"2d": 2, "3d": 3}


def _count(local: LocalCall) -> int:
    """The number of dims of positions, which is in the op's name."""
    return next(n for text, n in _POSITIONS.items() if text in str(local.call.op))


def _slides(local: LocalCall) -> list[Slide]:
    arg, n = local.arg, _count(local)
    dilation = local.call.args.get("dilation", (1,))
    first = local.call.args["self"].ndim - n
    return [
        Slide(
            first + i,
            setting(arg("kernel_size"), i),
            setting(arg("stride") or arg("kernel_size"), i),
            setting(arg("padding"), i),
            setting(dilation, i),
            transposed=False,
        )
        for i in range(n)
    ]


def _of_forward(local: LocalCall) -> tuple[Sliding, ...]:
    made = local.outputs[0]
    assert made is not None
    return sliding(local, local.spec("self"), made, _slides(local))


def _of_backward(local: LocalCall) -> tuple[Sliding, ...]:
    return sliding(local, local.spec("self"), local.spec("grad_output"), _slides(local))


def _padding(local: LocalCall, dims: Sequence[Sliding]) -> list[int]:
    """The padding of the dims that are whole; that of the others is in the window."""
    sharded = {dim.slide.dim for dim in dims}
    return [0 if slide.dim in sharded else slide.padding for slide in _slides(local)]


def _stride(local: LocalCall) -> list[int]:
    return [slide.stride for slide in _slides(local)]


def _given(values: Sequence[Tensor], outs: dict[str, Any]) -> Any:
    """Results as they are, or in the ``out=`` tensors."""
    into = [t for t in outs.values() if isinstance(t, Tensor)]
    made = [out.copy_(value) for out, value in zip(into, values, strict=True)] if into else list(values)
    return tuple(made) if len(made) > 1 else made[0]


# -- maxima ------------------------------------------------------------------------------------------------------


def _least(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def largest(
    local: LocalCall, x: Tensor, kernel: Any, _: Any, __: Any, dilation: Any, ceil_mode: bool, **outs: Any
) -> Any:
    """``max_poolNd_with_indices`` of shards of positions."""
    dims = local.once(_of_forward)
    reached = window(local, x, dims, _least(x.dtype))
    made = local.outputs[0]
    assert made is not None
    shape = local.local_shape(made)
    if 0 in shape:
        return _given([x.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=x.device)], outs)
    op: Any = local.call.op.overloadpacket
    values, at = op(reached, kernel, _stride(local), _padding(local, dims), dilation, ceil_mode)
    return _given([values, _in_plane(local, at, reached.shape, dims)], outs)


def _coordinates(at: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Places in a plane, by dim."""
    found = []
    for size in reversed(sizes):
        found.append(at % size)
        at = at // size
    return found[::-1]


def _places(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    at = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, sizes, strict=True):
        at = at * size + coordinate
    return at


def _in_plane(local: LocalCall, at: Tensor, shape: Sequence[int], dims: Sequence[Sliding]) -> Tensor:
    """Places in the window, in the whole plane."""
    n = _count(local)
    coordinates = _coordinates(at, shape[-n:])
    for dim in dims:
        i, step = dim.slide.dim - len(shape) + n, dim.slide.dilation
        coordinate = coordinates[i] - dim.reach.before + dim.reach.inside.start
        # Of nothing but minus infinities the kernels name the first place that is not padding.
        coordinates[i] = torch.where(coordinate < 0, coordinate + -(coordinate // step) * step, coordinate)
    return _places(coordinates, local.spec("self").shape[-n:])


def largest_backward(local: LocalCall, gradient: Tensor, x: Tensor, *args: Any, **outs: Any) -> Tensor:
    """``max_poolNd_with_indices_backward`` of shards of positions."""
    at, n = args[-1], _count(local)
    dims = local.once(_of_backward)
    sizes = list(x.shape)
    coordinates = _coordinates(at, local.spec("self").shape[-n:])
    for dim in dims:
        sizes[dim.slide.dim] = len(dim.reach.inside)
        coordinates[dim.slide.dim - x.ndim + n] -= dim.reach.inside.start
    found = gradient.new_zeros(sizes)
    if gradient.numel():
        places = _places(coordinates, sizes[-n:]).flatten(-n)
        found.view(*sizes[:-n], -1).scatter_add_(-1, places, gradient.flatten(-n))
    result: Tensor = _given([give_back(local, found, tuple(_unpadded(dims)))], outs)
    return result


def _unpadded(dims: Sequence[Sliding]) -> Iterator[Sliding]:
    """The dims with a window of what is inside the input only."""
    for dim in dims:
        yield evolve(dim, reach=evolve(dim.reach, before=0, after=0))


# -- averages ----------------------------------------------------------------------------------------------------


def _covered(slide: Slide, outputs: Run, size: int, *, with_padding: bool, like: Tensor) -> Tensor:
    """How many positions the window of each output covers along one dim."""
    start = torch.arange(outputs.start, outputs.stop, device=like.device) * slide.stride - slide.padding
    stop = start + slide.kernel
    if with_padding:
        return stop.clamp(max=size + slide.padding) - start
    return stop.clamp(max=size) - start.clamp(min=0)


def _divisor(local: LocalCall, like: Tensor, dims: Sequence[Sliding], with_padding: bool, instead: int | None) -> Any:
    """What the sum of each output's window is divided by."""
    if instead is not None:
        return instead
    spec = local.spec("self")
    runs = {dim.slide.dim: dim.outputs for dim in dims}
    total = torch.ones((), dtype=torch.int64, device=like.device)
    for slide in _slides(local):
        run = runs.get(slide.dim, Run(0, like.shape[slide.dim]))
        count = _covered(slide, run, spec.shape[slide.dim], with_padding=with_padding, like=like)
        total = total.unsqueeze(-1) * count
    return total.to(like.dtype)


def average(
    local: LocalCall,
    x: Tensor,
    kernel: Any,
    _: Any,
    __: Any,
    ceil_mode: bool,
    with_padding: bool,
    instead: int | None,
    **outs: Any,
) -> Tensor:
    """``avg_poolNd`` of shards of positions."""
    dims = local.once(_of_forward)
    reached = window(local, x, dims)
    made = local.outputs[0]
    assert made is not None
    shape = local.local_shape(made)
    if 0 in shape:
        found = x.new_zeros(shape)
    else:
        op: Any = local.call.op.overloadpacket
        found = op(reached, kernel, _stride(local), _padding(local, dims), ceil_mode, True, 1)
        found = found / _divisor(local, found, dims, with_padding, instead)
    result: Tensor = _given([found], outs)
    return result


def average_backward(
    local: LocalCall,
    gradient: Tensor,
    x: Tensor,
    kernel: Any,
    _: Any,
    __: Any,
    ceil_mode: bool,
    with_padding: bool,
    instead: int | None,
    **outs: Any,
) -> Tensor:
    """``avg_poolNd_backward`` of shards of positions."""
    dims = local.once(_of_backward)
    found = blank(x, dims)
    if gradient.numel():
        op: Any = local.call.op.overloadpacket
        share = gradient / _divisor(local, gradient, dims, with_padding, instead)
        found = op(share, found, kernel, _stride(local), _padding(local, dims), ceil_mode, True, 1)
    result: Tensor = _given([give_back(local, found, dims)], outs)
    return result
