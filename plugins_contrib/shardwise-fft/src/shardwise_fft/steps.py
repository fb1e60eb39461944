"""The steps of a distributed transform: local transforms, and what moves data between the ranks of a mesh dim.

A step takes this rank's part and gives the next one. Every rank runs the same steps, so their collectives pair up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import LocalCall
from shardwise.spec import chunk
from shardwise_fft.kernels import Kernel

__all__ = ["Along", "Compute", "Gather", "Place", "Step", "Swap", "from_lines", "lines_of", "ranks_of", "run_all"]


class Step(Protocol):
    """One step; see the module."""

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """What the rank has after the step."""
        ...


@frozen
class Compute:
    """Transform dims that every rank has whole."""

    dims: tuple[int, ...]
    kernel: Kernel

    def run(self, local: LocalCall, x: Tensor) -> Tensor:  # noqa: ARG002  as every step
        """See :class:`Step`."""
        return self.kernel.run(x, self.dims)


@frozen
class Swap:
    """One all-to-all: ``mesh_dim`` shards ``into`` in place of ``dim``, of which it is the innermost."""

    mesh_dim: int
    dim: int
    into: int

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        pieces = torch.split(x, _sizes(local, self.mesh_dim, x.shape[self.into]), self.into)
        return torch.cat(local.comm.all_to_all(pieces, self.mesh_dim), self.dim)


@frozen
class Gather:
    """Make a dim whole on ``mesh_dim``, which is the innermost that shards it."""

    mesh_dim: int
    dim: int

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        return torch.cat(local.comm.all_gather(x, self.mesh_dim), self.dim)


@frozen
class Place:
    """Keep what the result's spec gives to this rank, of dims that are whole."""

    dims: tuple[int, ...]

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        result = local.outputs[0]
        assert result is not None
        sizes, starts = local.local_shape(result), local.offset(result)
        for d in self.dims:
            x = x.narrow(d, starts[d], sizes[d])
        return x


@frozen
class Along:
    """Transform a sharded dim and leave it sharded: all lines along it are dealt out to the ranks, and returned.

    A line is one run of the dim; there are as many as the other dims have elements here. They are dealt out evenly,
    whatever the other dims are, in two all-to-alls per mesh dim that shards the dim.
    """

    dim: int
    mesh_dims: tuple[int, ...]
    kernel: Kernel

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        lines = lines_of(x, self.dim)
        for mesh_dim in reversed(self.mesh_dims):
            dealt = lines.tensor_split(ranks_of(local, mesh_dim), 0)
            lines = torch.cat(local.comm.all_to_all(dealt, mesh_dim), 1)
        lines = self.kernel.run(lines, (1,))
        for mesh_dim in self.mesh_dims:
            runs = torch.split(lines, _sizes(local, mesh_dim, lines.shape[1]), 1)
            lines = torch.cat(local.comm.all_to_all(runs, mesh_dim), 0)
        return from_lines(lines, x, self.dim)


def lines_of(x: Tensor, dim: int) -> Tensor:
    """The lines along a dim, one per row."""
    last = x.movedim(dim, -1)
    return last.reshape(last.shape[:-1].numel(), last.shape[-1])


def from_lines(lines: Tensor, x: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`lines_of` for lines of any length; ``x`` has the other dims."""
    return lines.reshape(*x.movedim(dim, -1).shape[:-1], lines.shape[1]).movedim(-1, dim)


def ranks_of(local: LocalCall, mesh_dim: int) -> int:
    """How many ranks a mesh dim has."""
    result = local.outputs[0]
    assert result is not None
    return result.mesh_shape[mesh_dim]


def _sizes(local: LocalCall, mesh_dim: int, size: int) -> list[int]:
    """How a dim that has ``size`` elements on this rank is split over a further mesh dim."""
    ranks = ranks_of(local, mesh_dim)
    return [chunk(size, ranks, i)[0] for i in range(ranks)]


def run_all(steps: Sequence[Step], local: LocalCall, x: Tensor) -> Tensor:
    """One step after the other."""
    for step in steps:
        x = step.run(local, x)
    return x
