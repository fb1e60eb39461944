"""Collectives under ``torch.compile``: a :class:`shardwise.comm.group.Group`'s, as functional ops of a graph.

While a program is traced its local tensors stand for values that do not exist yet, so nothing can be sent. Each
collective here becomes an op of the graph with a new tensor for a result, and a wait behind it, which a compiler may
move. Waiting, staging and buffers are the backend's business then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.kernel.reductions import REAL, as_sendable, average, is_native, reduce_stacked
from shardwise.private_torch.distributed import (
    graph_all_gather,
    graph_all_reduce,
    graph_all_to_all,
    graph_reduce_scatter,
)

__all__ = ["BACKEND_REDUCTIONS", "FunctionalGroup"]

# What a backend is asked for; an average is a sum that is divided afterwards, since not all of them average.
BACKEND_REDUCTIONS = {"sum": "sum", "avg": "sum", "product": "product", "max": "max", "min": "min"}


@frozen
class FunctionalGroup:
    """The ranks of a process group, in the order of a mesh. No method modifies what it is handed.

    ``order[i]`` is the position in the mesh's order of the process group's rank ``i``; ``None`` where they agree.
    ``scatters`` says whether the backend's own reduce-scatter sends less than an all-reduce.
    """

    process_group: Any
    size: int
    position: int
    order: tuple[int, ...] | None
    scatters: bool

    # -- movement --

    def all_gather(self, piece: Tensor) -> Tensor:
        """The pieces of all ranks, stacked."""
        flat = as_sendable(piece.reshape(-1))
        blocks = graph_all_gather(flat, self.size, self.process_group).view(self.size, -1)
        if self.order:
            blocks = torch.stack([blocks[self.order.index(i)] for i in range(self.size)])
        return blocks.view(piece.dtype).view(self.size, *piece.shape)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """Send ``pieces[i]`` to rank ``i``; the result stacks what each rank sent here."""
        share = [pieces.reshape(self.size, -1).shape[1]] * self.size
        return self.exchange(pieces.reshape(-1), share, share).view(pieces.shape)

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive runs of a flat tensor, ``sent[i]`` elements to rank ``i``; ``received`` likewise."""
        bytes_ = as_sendable(flat)
        unit = flat.dtype.itemsize // bytes_.dtype.itemsize
        out, back = [n * unit for n in sent], [n * unit for n in received]
        moved = (
            self._exchange(bytes_, out, back) if self.order else graph_all_to_all(bytes_, back, out, self.process_group)
        )
        return moved.view(flat.dtype)

    def _exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """As the process group counts its ranks: bring the runs into that order, and back."""
        order: Any = self.order
        runs = flat.split_with_sizes(list(sent))
        counts = [received[i] for i in order], [sent[i] for i in order]
        moved = graph_all_to_all(torch.cat([runs[i] for i in order]), *counts, self.process_group)
        parts = moved.split_with_sizes(counts[0])
        return torch.cat([parts[order.index(i)] for i in range(self.size)])

    # -- reduction --

    def all_reduce(self, tensor: Tensor, kind: str) -> Tensor:
        """The reduction over all ranks."""
        if not is_native(kind, tensor.dtype):
            return reduce_stacked(self.all_gather(tensor), kind)
        found = graph_all_reduce(_real(tensor), BACKEND_REDUCTIONS[kind], self.process_group)
        return self._finished(_as(found, tensor), kind)

    def reduce_scatter(self, pieces: Tensor, kind: str) -> Tensor:
        """The reduction of all ranks' ``pieces[position]``."""
        if self.order or not self.scatters or not is_native(kind, pieces.dtype):
            return self._reduce(self.all_to_all(pieces), kind)
        found = graph_reduce_scatter(_real(pieces), BACKEND_REDUCTIONS[kind], self.size, self.process_group)
        return self._finished(_as(found, pieces).view(pieces.shape[1:]), kind)

    def reduce_scatter_uneven(self, flat: Tensor, sent: Sequence[int], kind: str) -> Tensor:
        """As :meth:`reduce_scatter` for flat pieces of ``sent[i]`` elements; the result is flat."""
        here = sent[self.position]
        return self._reduce(self.exchange(flat, sent, [here] * self.size).view(self.size, here), kind)

    def _reduce(self, stacked: Tensor, kind: str) -> Tensor:
        if kind in ("sum", "avg") and is_native(kind, stacked.dtype):
            return self._finished(stacked.sum(0, dtype=stacked.dtype), kind)
        return reduce_stacked(stacked, kind)

    def _finished(self, total: Tensor, kind: str) -> Tensor:
        return average(total, self.size) if kind == "avg" else total


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.dtype in REAL else tensor


def _as(found: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(found) if like.dtype in REAL else found
