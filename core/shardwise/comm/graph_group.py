"""Collectives under ``torch.compile``: functional ops of a graph.

While a program is traced its local tensors stand for values that do not exist yet, so nothing can be sent. Each
collective becomes an op of the graph with a new tensor as its result, and a wait after it, which a compiler may move.
Waiting, staging and buffers are then up to the compiler's backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.collectives import Collectives
from shardwise.errors import UnseenGraphWarning, warn_user
from shardwise.kernel.reductions import REAL, add_up, as_sendable, average, is_native, reduce_stacked, scaled_down
from shardwise.private_torch.distributed import (
    calls_go_unseen,
    graph_all_gather,
    graph_all_reduce,
    graph_all_to_all,
    graph_reduce_scatter,
)

__all__ = ["BACKEND_REDUCTIONS", "GraphGroup"]

# By reduction, the backend's reduction. An average is a sum that is divided afterwards: not all backends average.
BACKEND_REDUCTIONS = {"sum": "sum", "avg": "sum", "product": "product", "max": "max", "min": "min"}


@frozen
class GraphGroup(Collectives):
    """The collectives of a process group as ops of a graph. Every result is there at once.

    ``order[i]`` is the position in the mesh's order of the process group's rank ``i``, ``None`` where the orders are
    the same. ``scatters`` says whether the backend's own reduce-scatter sends less than an all-reduce.
    """

    process_group: Any
    size: int
    position: int
    mesh_dims: tuple[int, ...]
    order: tuple[int, ...] | None
    scatters: bool

    @property
    def _noticed(self) -> Any:
        """The process group, for a collective of a graph that is made now."""
        if calls_go_unseen():
            _warn_once()
        return self.process_group

    # -- movement --

    def start_all_gather(self, out: Tensor, piece: Tensor) -> AsyncResult:
        """The pieces of all ranks in a new tensor of ``out``'s shape."""
        return AsyncResult(None, self._gathered(piece).view(out.shape))

    def start_all_to_all(self, pieces: Tensor) -> AsyncResult:
        return AsyncResult(None, self._exchanged_pieces(pieces))

    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncResult:
        return AsyncResult(None, self._exchanged(flat, sent, received))

    def start_shift(self, flat: Tensor, by: int, count: int) -> AsyncResult:
        """An exchange in which the other ranks send nothing."""
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.position + by) % self.size], received[(self.position - by) % self.size] = flat.numel(), count
        return self.start_exchange(flat, sent, received)

    def _gathered(self, piece: Tensor) -> Tensor:
        """The pieces of all ranks, stacked."""
        flat = as_sendable(piece.reshape(-1))
        blocks = graph_all_gather(flat, self.size, self._noticed).view(self.size, -1)
        if self.order:
            blocks = torch.stack([blocks[self.order.index(i)] for i in range(self.size)])
        return blocks.view(piece.dtype).view(self.size, *piece.shape)

    def _exchanged_pieces(self, pieces: Tensor) -> Tensor:
        share = [pieces.reshape(self.size, -1).shape[1]] * self.size
        return self._exchanged(pieces.reshape(-1), share, share).view(pieces.shape)

    def _exchanged(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        sendable = as_sendable(flat)
        unit = flat.dtype.itemsize // sendable.dtype.itemsize
        out, back = [n * unit for n in sent], [n * unit for n in received]
        if not self.order:
            return graph_all_to_all(sendable, back, out, self._noticed).view(flat.dtype)
        # Bring the runs into the process group's order of ranks, and back.
        order = self.order
        runs = sendable.split_with_sizes(out)
        counts = [back[i] for i in order], [out[i] for i in order]
        moved = graph_all_to_all(torch.cat([runs[i] for i in order]), *counts, self._noticed)
        parts = moved.split_with_sizes(counts[0])
        return torch.cat([parts[order.index(i)] for i in range(self.size)]).view(flat.dtype)

    # -- reduction --

    def start_all_reduce(self, tensor: Tensor, kind: str) -> AsyncResult:
        if not is_native(kind, tensor.dtype):
            return AsyncResult(None, reduce_stacked(self._gathered(tensor), kind))
        reduced = graph_all_reduce(_real(self._scaled(tensor, kind)), BACKEND_REDUCTIONS[kind], self._noticed)
        return AsyncResult(None, self._averaged(_with_dtype_of(tensor, reduced), kind))

    def start_reduce_scatter(self, pieces: Tensor, kind: str) -> AsyncResult:
        if self.order or not self.scatters or not is_native(kind, pieces.dtype):
            return AsyncResult(None, self._reduced(self._exchanged_pieces(pieces), kind))
        added = _real(self._scaled(pieces, kind))
        reduced = graph_reduce_scatter(added, BACKEND_REDUCTIONS[kind], self.size, self._noticed)
        return AsyncResult(None, self._averaged(_with_dtype_of(pieces, reduced).view(pieces.shape[1:]), kind))

    def start_reduce_scatter_uneven(self, flat: Tensor, sent: Sequence[int], kind: str) -> AsyncResult:
        share = sent[self.position]
        received = self._exchanged(flat, sent, [share] * self.size)
        return AsyncResult(None, self._reduced(received.view(self.size, share), kind))

    def _reduced(self, stacked: Tensor, kind: str) -> Tensor:
        if kind in ("sum", "avg") and is_native(kind, stacked.dtype):
            return self._averaged(add_up(self._scaled(stacked, kind)), kind)
        return reduce_stacked(stacked, kind)

    def _scaled(self, pieces: Tensor, kind: str) -> Tensor:
        return scaled_down(pieces, self.size) if kind == "avg" else pieces

    def _averaged(self, total: Tensor, kind: str) -> Tensor:
        return average(total, self.size) if kind == "avg" else total


@cache
def _warn_once() -> None:
    warn_user(
        "torch._inductor.config.cpp_wrapper is on: graphs that are compiled with it call collectives where shardwise "
        "does not see them. They are not recorded, not compared over the ranks, and not in a timeline. Compile without "
        "it to have them checked.",
        UnseenGraphWarning,
    )


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.dtype in REAL else tensor


def _with_dtype_of(tensor: Tensor, reduced: Tensor) -> Tensor:
    return torch.view_as_complex(reduced) if tensor.dtype in REAL else reduced
