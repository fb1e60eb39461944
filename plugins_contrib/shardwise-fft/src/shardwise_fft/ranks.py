"""The ranks of some mesh dims as one line, and how a tensor dim is shared among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import field, frozen

from shardwise.rule import LocalCall, chunk

__all__ = ["Ranks", "ranks_over"]


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class Ranks:
    """Mesh dims whose ranks are counted row-major in this order, and this rank's place on each."""

    mesh_dims: tuple[int, ...] = field(converter=_ints)
    shape: tuple[int, ...] = field(converter=_ints)
    place: tuple[int, ...] = field(converter=_ints)

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    @property
    def here(self) -> int:
        """The number of this rank among them."""
        number = 0
        for count, at in zip(self.shape, self.place, strict=True):
            number = number * count + at
        return number

    def shares(self, size: int) -> list[int]:
        """How many of ``size`` elements each rank has if the mesh dims shard them, the first one outermost."""
        sizes = [size]
        for count in self.shape:
            sizes = [chunk(n, count, i)[0] for n in sizes for i in range(count)]
        return sizes

    def share(self, size: int) -> int:
        """How many of them this rank has."""
        return self.shares(size)[self.here]


def ranks_over(local: LocalCall, mesh_dims: Sequence[int]) -> Ranks:
    """The ranks along some mesh dims, at this rank's place on all others."""
    source = local.inputs[0]
    assert source is not None
    return Ranks(mesh_dims, [source.mesh_shape[m] for m in mesh_dims], [local.coordinate[m] for m in mesh_dims])
