"""Windows that slide over sharded positions: each rank fetches what its outputs reach and pads it at the edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from shardwise.rule import LocalCall, TensorSpec
from shardwise_conv.halo import Exchange, Reach, Run, fetched, reached, returned, runs

__all__ = ["Slide", "Sliding", "amounts", "blank", "give_back", "setting", "sliding", "window"]


def setting(values: Sequence[int], i: int) -> int:
    """The setting of one dim of positions; one number may serve all dims."""
    return values[i] if len(values) > 1 else values[0]


@frozen
class Slide:
    """The settings of a sliding window along one dim."""

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
        """The input positions that some outputs need, of a dim of ``size``."""
        if not len(outputs):
            return reached(0, 0, size)
        if not self.transposed:
            first = outputs.start * self.stride - self.padding
            return reached(first, (outputs.stop - 1) * self.stride - self.padding + self.width, size)
        first = -((self.width - 1 - outputs.start - self.padding) // self.stride)
        inside = reached(first, (outputs.stop - 1 + self.padding) // self.stride + 1, size).inside
        return Reach(inside, 0, 0)

    def cut(self, outputs: Run, reach: Reach) -> tuple[int, int]:
        """Start and stop of these outputs in a transposed convolution of ``reach`` without padding."""
        start = outputs.start + self.padding - reach.inside.start * self.stride
        return start, start + len(outputs)


@frozen
class Sliding:
    """One sharded dim of one rank's call."""

    slide: Slide
    exchange: Exchange
    reach: Reach
    outputs: Run


def sliding(local: LocalCall, x: TensorSpec, result: TensorSpec, slides: Sequence[Slide]) -> tuple[Sliding, ...]:
    """The dims among ``slides`` that are sharded, with the exchange along each that ``result`` needs of ``x``."""
    dims = []
    for slide in slides:
        mesh_dims = local.sharding(x, slide.dim)
        if not mesh_dims:
            continue
        held, outputs = (runs(local, spec, slide.dim, mesh_dims) for spec in (x, result))
        reaches = [slide.reach(run, x.shape[slide.dim]) for run in outputs]
        at = 0
        for m in mesh_dims:
            at = at * x.mesh_shape[m] + local.coordinate[m]
        exchange = Exchange(slide.dim, mesh_dims, tuple(held), tuple(reach.inside for reach in reaches), at)
        dims.append(Sliding(slide, exchange, reaches[at], outputs[at]))
    return tuple(dims)


def amounts(ndim: int, of_dim: Mapping[int, tuple[int, int]]) -> list[int]:
    """The argument of ``pad``, last dim first."""
    return [n for dim in range(ndim - 1, min(of_dim, default=ndim) - 1, -1) for n in of_dim.get(dim, (0, 0))]


def window(local: LocalCall, x: Tensor, dims: Sequence[Sliding], value: float = 0) -> Tensor:
    """All that this rank's outputs reach, with ``value`` beyond the edges of the input."""
    for dim in dims:
        x = fetched(local, x, dim.exchange)
    edges = {d.slide.dim: (d.reach.before, d.reach.after) for d in dims}
    return pad(x, amounts(x.ndim, edges), value=value) if any(map(any, edges.values())) else x


def blank(x: Tensor, dims: Sequence[Sliding]) -> Tensor:
    """A tensor of the window's shape, for use where its values do not matter."""
    shape = list(x.shape)
    for dim in dims:
        shape[dim.slide.dim] = dim.reach.before + len(dim.reach.inside) + dim.reach.after
    return x.new_zeros(shape)


def give_back(local: LocalCall, gradient: Tensor, dims: Sequence[Sliding]) -> Tensor:
    """The gradient by this rank's shard, from the gradients that all ranks have by their windows."""
    for dim in dims:
        gradient = gradient.narrow(dim.slide.dim, dim.reach.before, len(dim.reach.inside))
    for dim in reversed(dims):
        gradient = returned(local, gradient, dim.exchange)
    return gradient
