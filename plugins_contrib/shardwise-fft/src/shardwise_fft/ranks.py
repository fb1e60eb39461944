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
    """Mesh dims whose ranks are counted row-major, in the order given, and this rank's place on each."""

    mesh_dims: tuple[int, ...] = field(converter=_ints)
    shape: tuple[int, ...] = field(converter=_ints)
    place: tuple[int, ...] = field(converter=_ints)

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    @property
    def here(self) -> int:
        """Which of them this one is."""
        found = 0
        for count, at in zip(self.shape, self.place, strict=True):
            found = found * count + at
        return found

    def shares(self, size: int) -> list[int]:
        """What each rank has of ``size`` elements that the mesh dims shard, the first of them outermost."""
        found = [size]
        for count in self.shape:
            found = [chunk(n, count, i)[0] for n in found for i in range(count)]
        return found

    def share(self, size: int) -> int:
        """What this rank has of them."""
        return self.shares(size)[self.here]


def ranks_over(local: LocalCall, mesh_dims: Sequence[int]) -> Ranks:
    """The ranks along some mesh dims, at this rank's place on all others."""
    source = local.inputs[0]
    assert source is not None
    return Ranks(mesh_dims, [source.mesh_shape[m] for m in mesh_dims], [local.coordinate[m] for m in mesh_dims])
