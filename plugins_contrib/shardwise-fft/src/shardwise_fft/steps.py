"""The steps of a distributed transform: local transforms, and what moves data between the ranks of a mesh dim.

A step turns this rank's part into its next part. Every rank runs the same steps, so their collectives match; each
rank knows the shapes of the tensors that it receives, so they need no exchange of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from shardwise.rule import LocalCall
from shardwise_fft.kernels import Kernel
from shardwise_fft.ranks import Ranks

__all__ = ["Along", "Compute", "Gather", "Place", "Step", "Swap", "from_lines", "lines_of", "run_all"]


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
    """One all-to-all: the ranks of ``over`` shard ``into`` in place of ``dim``, of which they are the innermost.

    Together they have ``size`` elements of ``dim``.
    """

    over: Ranks
    dim: int
    into: int
    size: int

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        pieces = torch.split(x, self.over.shares(x.shape[self.into]), self.into)
        shapes = _resized(pieces[self.over.here], self.dim, self.over.shares(self.size))
        return torch.cat(local.comm.all_to_all(pieces, self.over.mesh_dims, shapes), self.dim)


@frozen
class Gather:
    """Make a dim whole on the ranks of ``over``, its innermost ones; together they hold ``size`` elements of it."""

    over: Ranks
    dim: int
    size: int

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        # An all-gather takes no shapes of the received tensors; an all-to-all of the same tensor does the same.
        shapes = _resized(x, self.dim, self.over.shares(self.size))
        return torch.cat(local.comm.all_to_all([x] * self.over.count, self.over.mesh_dims, shapes), self.dim)


@frozen
class Place:
    """Keep this rank's part of dims that are whole, by the spec of the result."""

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
    """Transform a dim of ``size`` that the ranks of ``over`` shard, and leave it so: each rank gets some of its lines.

    A line is one run of the dim; there are as many as the other dims have elements here. They are shared out evenly,
    whatever the other dims are, transformed, and sent back: two all-to-alls.
    """

    over: Ranks
    dim: int
    kernel: Kernel
    size: int

    def run(self, local: LocalCall, x: Tensor) -> Tensor:
        """See :class:`Step`."""
        over, comm = self.over, local.comm
        pieces = lines_of(x, self.dim).tensor_split(over.count, 0)
        own = len(pieces[over.here])
        shapes = [(own, n) for n in over.shares(self.size)]
        lines = self.kernel.run(torch.cat(comm.all_to_all(pieces, over.mesh_dims, shapes), 1), (1,))
        shares = over.shares(lines.shape[1])
        back = [(len(piece), shares[over.here]) for piece in pieces]
        lines = torch.cat(comm.all_to_all(torch.split(lines, shares, 1), over.mesh_dims, back), 0)
        return from_lines(lines, x, self.dim)


def lines_of(x: Tensor, dim: int) -> Tensor:
    """The lines along a dim, one per row."""
    last = x.movedim(dim, -1)
    return last.reshape(last.shape[:-1].numel(), last.shape[-1])


def from_lines(lines: Tensor, x: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`lines_of` for lines of any length; ``x`` has the other dims."""
    return lines.reshape(*x.movedim(dim, -1).shape[:-1], lines.shape[1]).movedim(-1, dim)


def _resized(x: Tensor, dim: int, sizes: Sequence[int]) -> list[list[int]]:
    """The shape of ``x`` with each of these sizes along a dim."""
    return [[*x.shape[:dim], n, *x.shape[dim + 1 :]] for n in sizes]


def run_all(steps: Sequence[Step], local: LocalCall, x: Tensor) -> Tensor:
    """One step after the other."""
    for step in steps:
        x = step.run(local, x)
    return x
