"""The interface of a group: its collectives, whether they run now or become ops of a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shardwise.comm.async_result import AsyncResult

__all__ = ["Collectives"]


class Collectives(ABC):
    """Collectives of the ranks along some mesh dims.

    ``size`` is the number of ranks, ``position`` that of this rank, in row-major order of their coordinates. Tensors
    must be contiguous and have the same dtype on all ranks. A method modifies no argument unless it says so.
    """

    size: int
    position: int
    mesh_dims: tuple[int, ...]

    # -- movement --

    @abstractmethod
    def start_all_gather(self, out: Tensor, piece: Tensor) -> AsyncResult:
        """Fill ``out`` with the pieces of all ranks, one after the other; the pieces have one shape."""

    @abstractmethod
    def start_all_to_all(self, pieces: Tensor) -> AsyncResult:
        """Send ``pieces[i]`` to rank ``i``. The result stacks the pieces that came from the ranks, all of one shape."""

    @abstractmethod
    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncResult:
        """Send consecutive runs of a flat tensor, ``sent[i]`` elements to rank ``i``.

        The result has ``received[i]`` elements of rank ``i``, one run after the other.
        """

    @abstractmethod
    def start_shift(self, flat: Tensor, by: int, count: int) -> AsyncResult:
        """Send a flat tensor to the rank ``by`` further on, and receive ``count`` elements from the rank ``by`` before.

        The last rank is followed by the first one.
        """

    # -- reduction --

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, kind: str) -> AsyncResult:
        """The reduction over all ranks; may overwrite ``tensor``."""

    @abstractmethod
    def start_reduce_scatter(self, pieces: Tensor, kind: str) -> AsyncResult:
        """The reduction over all ranks of their ``pieces[position]``; the pieces have one shape."""

    @abstractmethod
    def start_reduce_scatter_uneven(self, flat: Tensor, sent: Sequence[int], kind: str) -> AsyncResult:
        """As :meth:`start_reduce_scatter`, for flat pieces of ``sent[i]`` elements; the result is flat."""

    # -- and wait --

    def all_gather(self, piece: Tensor) -> Tensor:
        """The pieces of all ranks, stacked."""
        return self.start_all_gather(piece.new_empty((self.size, *piece.shape)), piece).wait()

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """:meth:`start_all_to_all`, and wait."""
        return self.start_all_to_all(pieces).wait()

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """:meth:`start_exchange`, and wait."""
        return self.start_exchange(flat, sent, received).wait()

    def all_reduce_(self, tensor: Tensor, kind: str) -> Tensor:
        """:meth:`start_all_reduce`, and wait."""
        return self.start_all_reduce(tensor, kind).wait()
