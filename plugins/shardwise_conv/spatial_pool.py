"""Pooling over sharded positions, forward and backward, by halo exchange.

A maximum needs only its window; its index counts in the whole plane. An average divides by the number of positions of
the whole plane that its window covers.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    result = local.outputs[0]
    assert result is not None
    return sliding(local, local.spec("self"), result, _slides(local))


def _of_backward(local: LocalCall) -> tuple[Sliding, ...]:
    return sliding(local, local.spec("self"), local.spec("grad_output"), _slides(local))


def _padding(local: LocalCall, dims: Sequence[Sliding]) -> list[int]:
    """The padding by dim. It is zero for the sharded dims, whose window already includes it."""
    sharded = {dim.slide.dim for dim in dims}
    return [0 if slide.dim in sharded else slide.padding for slide in _slides(local)]


def _stride(local: LocalCall) -> list[int]:
    return [slide.stride for slide in _slides(local)]


def _returned(values: Sequence[Tensor], outs: dict[str, Any]) -> Any:
    """What the op returns: the values, or the ``out=`` tensors filled with them."""
    into = [t for t in outs.values() if isinstance(t, Tensor)]
    results = [out.copy_(value) for out, value in zip(into, values, strict=True)] if into else list(values)
    return tuple(results) if len(results) > 1 else results[0]


# -- maxima ------------------------------------------------------------------------------------------------------


def largest(
    local: LocalCall, x: Tensor, kernel: Any, _: Any, __: Any, dilation: Any, ceil_mode: bool, **outs: Any
) -> Any:
    """``max_poolNd_with_indices`` of shards of positions."""
    dims = local.once(_of_forward)
    least = float("-inf") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    reached = window(local, x, dims, least)
    spec = local.outputs[0]
    assert spec is not None
    shape = local.local_shape(spec)
    if 0 in shape:
        return _returned([x.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=x.device)], outs)
    op: Any = local.call.op.overloadpacket
    values, at = op(reached, kernel, _stride(local), _padding(local, dims), dilation, ceil_mode)
    return _returned([values, _in_plane(local, at, reached.shape, dims)], outs)


def _coordinates(at: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Flat indices of a plane as coordinates, by dim."""
    coordinates = []
    for size in reversed(sizes):
        coordinates.append(at % size)
        at = at // size
    return coordinates[::-1]


def _flat(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The inverse of :func:`_coordinates`."""
    at = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, sizes, strict=True):
        at = at * size + coordinate
    return at


def _in_plane(local: LocalCall, at: Tensor, shape: Sequence[int], dims: Sequence[Sliding]) -> Tensor:
    """Flat indices of the window as flat indices of the whole plane."""
    n = _count(local)
    coordinates = _coordinates(at, shape[-n:])
    for dim in dims:
        i, step = dim.slide.dim - len(shape) + n, dim.slide.dilation
        coordinate = coordinates[i] - dim.reach.before + dim.reach.inside.start
        # Where all values are minus infinity, the kernels name the first position that is not padding.
        coordinates[i] = torch.where(coordinate < 0, coordinate + -(coordinate // step) * step, coordinate)
    return _flat(coordinates, local.spec("self").shape[-n:])


def largest_backward(local: LocalCall, gradient: Tensor, x: Tensor, *args: Any, **outs: Any) -> Tensor:
    """``max_poolNd_with_indices_backward`` of shards of positions."""
    at, n = args[-1], _count(local)
    dims = local.once(_of_backward)
    sizes = list(x.shape)
    coordinates = _coordinates(at, local.spec("self").shape[-n:])
    for dim in dims:
        sizes[dim.slide.dim] = len(dim.reach.inside)
        coordinates[dim.slide.dim - x.ndim + n] -= dim.reach.inside.start
    by_window = gradient.new_zeros(sizes)
    if gradient.numel():
        places = _flat(coordinates, sizes[-n:]).flatten(-n)
        by_window.view(*sizes[:-n], -1).scatter_add_(-1, places, gradient.flatten(-n))
    inside = [evolve(dim, reach=evolve(dim.reach, before=0, after=0)) for dim in dims]
    result: Tensor = _returned([give_back(local, by_window, inside)], outs)
    return result


# -- averages ----------------------------------------------------------------------------------------------------


def _covered(slide: Slide, outputs: Run, size: int, *, with_padding: bool, like: Tensor) -> Tensor:
    """The number of positions that the window of each output covers along one dim."""
    start = torch.arange(outputs.start, outputs.stop, device=like.device) * slide.stride - slide.padding
    stop = start + slide.kernel
    if with_padding:
        return stop.clamp(max=size + slide.padding) - start
    return stop.clamp(max=size) - start.clamp(min=0)


def _divisor(local: LocalCall, like: Tensor, dims: Sequence[Sliding], with_padding: bool, instead: int | None) -> Any:
    """The divisor of the sum of each output's window."""
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
    spec = local.outputs[0]
    assert spec is not None
    shape = local.local_shape(spec)
    if 0 in shape:
        means = x.new_zeros(shape)
    else:
        op: Any = local.call.op.overloadpacket
        # Torch adds halves in float32, where a window of large ones does not overflow.
        wide = reached.float() if reached.dtype in (torch.float16, torch.bfloat16) else reached
        sums = op(wide, kernel, _stride(local), _padding(local, dims), ceil_mode, True, 1)
        means = (sums / _divisor(local, sums, dims, with_padding, instead)).to(x.dtype)
    result: Tensor = _returned([means], outs)
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
    by_window = blank(x, dims)
    if gradient.numel():
        op: Any = local.call.op.overloadpacket
        share = gradient / _divisor(local, gradient, dims, with_padding, instead)
        by_window = op(share, by_window, kernel, _stride(local), _padding(local, dims), ceil_mode, True, 1)
    result: Tensor = _returned([give_back(local, by_window, dims)], outs)
    return result
