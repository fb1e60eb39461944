"""Collectives: straight calls of the process groups behind a mesh, for contiguous tensors.

A :class:`Group` is the ranks along one or several mesh dims, in row-major order of their coordinates. Its methods make
up for what backends leave out: dtypes that a backend cannot carry travel as bytes; reductions that it lacks or gets
wrong (max and min of floats: backends drop NaN) are an exchange and a local reduction; gloo sees CPU tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.async_result import AsyncResult, SendReceive
from shardwise.comm.coalescing import _Batch, _here
from shardwise.comm.events import Event, emit, is_observed, numbers, observers, waited
from shardwise.comm.graph_group import BACKEND_REDUCTIONS, FunctionalGroup
from shardwise.kernel.reductions import REAL, SENDABLE, as_sendable, average, is_native, reduce_stacked
from shardwise.private_torch.tracing import is_traced

__all__ = ["REDUCE_OP_OF", "Group"]

REDUCE_OP_OF = {reduction: getattr(dist.ReduceOp, name.upper()) for reduction, name in BACKEND_REDUCTIONS.items()}
# Up to this many gathered bytes one all-gather beats an exchange and an all-gather: it is latency that counts.
_SMALL = 1 << 16


class Group:
    """The ranks along some mesh dims; ``position`` is this rank's, ``size`` their number.

    All tensors handed in must be contiguous and alike in dtype on all ranks; none is modified but where a method says
    so.
    """

    def __init__(
        self,
        process_group: Any,
        size: int,
        position: int,
        mesh_dims: tuple[int, ...],
        backend: str,
        order: tuple[int, ...] | None,
    ) -> None:
        self.process_group = process_group
        self.size = size
        self.position = position
        self.mesh_dims = mesh_dims
        # order[i] is the position here of the process group's rank i; None, the usual case, where they agree.
        self._order = order
        self.is_gloo = backend == "gloo"
        if process_group is None:
            return
        self._functional = FunctionalGroup(process_group, size, position, order, not self.is_gloo)
        # Named all_gather_single from torch 2.13 on; the coalesced form is the public one that older releases have.
        self._gather = getattr(process_group, "all_gather_single", None) or self._gather_coalesced
        self._sum_options = {kind: _all_reduce_options(op) for kind, op in REDUCE_OP_OF.items()}
        self._scatter_options = {kind: _reduce_scatter_options(op) for kind, op in REDUCE_OP_OF.items()}

    def __repr__(self) -> str:
        return f"Group(mesh_dims={self.mesh_dims}, size={self.size}, position={self.position})"

    # -- movement --

    def start_all_gather(self, out: Tensor, piece: Tensor) -> AsyncResult:
        """Fill ``out`` with the pieces of all ranks, one behind the other; the pieces are of one shape."""
        if is_traced(piece):
            return AsyncResult(None, self._functional.all_gather(piece).view(out.shape))
        batch = _here.batch
        result = self._all_gather(out, piece, batch)
        # Coalesced gathers are reported as one.
        return self._observed(result, "all_gather", piece) if observers and (batch is None or self._order) else result

    def all_gather(self, piece: Tensor) -> Tensor:
        """The pieces of all ranks, stacked."""
        return self.start_all_gather(piece.new_empty((self.size, *piece.shape)), piece).wait()

    def start_all_to_all(self, pieces: Tensor) -> AsyncResult:
        """Send ``pieces[i]`` to rank ``i``; the result stacks what each rank sent here, all of one shape."""
        if is_traced(pieces):
            return AsyncResult(None, self._functional.all_to_all(pieces))
        result = self._all_to_all(torch.empty_like(pieces), pieces, [], [])
        return self._observed(result, "all_to_all", pieces) if observers else result

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """:meth:`start_all_to_all`, and wait."""
        return self.start_all_to_all(pieces).wait()

    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncResult:
        """Send consecutive runs of a flat tensor, ``sent[i]`` elements to rank ``i``; ``received`` likewise."""
        if is_traced(flat):
            return AsyncResult(None, self._functional.exchange(flat, sent, received))
        result = self._exchange(flat, sent, received)
        return self._observed(result, "all_to_all", flat) if observers else result

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """:meth:`start_exchange`, and wait."""
        return self.start_exchange(flat, sent, received).wait()

    def start_shift(self, flat: Tensor, by: int, count: int) -> AsyncResult:
        """Send a flat tensor to the rank ``by`` further, wrapping round; ``count`` elements come from the one before.

        Point to point, but where a backend cannot: then it is an exchange in which the others have no part.
        """
        there, before = (self.position + by) % self.size, (self.position - by) % self.size
        if is_traced(flat) or self._stages(flat):
            sent, received = [0] * self.size, [0] * self.size
            sent[there], received[before] = flat.numel(), count
            return self.start_exchange(flat, sent, received)
        out = flat.new_empty(count)
        result = AsyncResult(self._send_receive(as_sendable(flat), there, as_sendable(out), before), out, flat)
        return self._observed(result, "shift", flat) if observers else result

    # -- reduction --

    def start_all_reduce(self, tensor: Tensor, kind: str) -> AsyncResult:
        """The reduction over all ranks; may use ``tensor``'s memory for it."""
        if is_traced(tensor):
            return AsyncResult(None, self._functional.all_reduce(tensor, kind))
        if is_native(kind, tensor.dtype):
            result = self._all_reduce(tensor, kind)
        else:
            result = self._reduce_by_moving(tensor, kind)
        return self._observed(result, "all_reduce", tensor) if observers else result

    def all_reduce_(self, tensor: Tensor, kind: str) -> Tensor:
        """:meth:`start_all_reduce`, and wait."""
        return self.start_all_reduce(tensor, kind).wait()

    def start_reduce_scatter(self, pieces: Tensor, kind: str) -> AsyncResult:
        """The reduction of all ranks' ``pieces[position]``; the pieces are of one shape."""
        if is_traced(pieces):
            return AsyncResult(None, self._functional.reduce_scatter(pieces, kind))
        # gloo's own is an all-reduce of everything.
        if self.is_gloo or self._order or not is_native(kind, pieces.dtype) or pieces.dtype in REAL:
            result = self._all_to_all(torch.empty_like(pieces), pieces, [], [])
            result.then(lambda stacked: self._reduce(stacked, kind))
        else:
            out = pieces.new_empty(pieces.shape[1:])
            flat = [out.view(-1)], [pieces.view(-1)]
            work = self.process_group.reduce_scatter_tensor_coalesced(*flat, self._scatter_options[kind])
            result = self._averaged(AsyncResult(work, out, pieces), kind)
        return self._observed(result, "reduce_scatter", pieces) if observers else result

    def start_reduce_scatter_uneven(self, flat: Tensor, sent: Sequence[int], kind: str) -> AsyncResult:
        """As :meth:`start_reduce_scatter` for flat pieces of ``sent[i]`` elements; the result is flat."""
        if is_traced(flat):
            return AsyncResult(None, self._functional.reduce_scatter_uneven(flat, sent, kind))
        here = sent[self.position]
        result = self._exchange(flat, sent, [here] * self.size)
        result.then(lambda received: self._reduce(received.view(self.size, here), kind))
        return self._observed(result, "reduce_scatter", flat) if observers else result

    def _all_reduce(self, tensor: Tensor, kind: str) -> AsyncResult:
        flat = tensor.view(-1).view(REAL[tensor.dtype]) if tensor.dtype in REAL else tensor
        staged = flat.to("cpu", copy=True) if self._stages(flat) else flat
        result = AsyncResult(self.process_group.allreduce([staged], self._sum_options[kind]), tensor, staged)
        if staged is not flat:
            result.then(lambda whole: _filled(flat, staged, whole))
        return self._averaged(result, kind)

    def _averaged(self, result: AsyncResult, kind: str) -> AsyncResult:
        return result.then(lambda total: average(total, self.size)) if kind == "avg" else result

    def _reduce(self, stacked: Tensor, kind: str) -> Tensor:
        if not is_native(kind, stacked.dtype):
            return reduce_stacked(stacked, kind)
        if kind in ("max", "min"):
            return stacked.amax(0) if kind == "max" else stacked.amin(0)
        found = stacked.prod(0, dtype=stacked.dtype) if kind == "product" else stacked.sum(0, dtype=stacked.dtype)
        return average(found, self.size) if kind == "avg" else found

    def _reduce_by_moving(self, tensor: Tensor, kind: str) -> AsyncResult:
        """Every rank reduces its part of the elements and the parts are gathered; small tensors are gathered whole."""
        if tensor.nbytes * self.size <= _SMALL:
            gathered = tensor.new_empty((self.size, *tensor.shape))
            return self._all_gather(gathered, tensor).then(lambda stacked: reduce_stacked(stacked, kind))
        count, shape = tensor.numel(), tensor.shape
        share = -(-count // self.size)
        padded = tensor.new_zeros(share * self.size)
        padded[:count] = tensor.view(-1)
        # Waited for here: no collective may be issued when a result is taken.
        received = self._all_to_all(torch.empty_like(padded), padded, [], []).wait()
        reduced = reduce_stacked(received.view(self.size, share), kind)
        return self._all_gather(padded, reduced).then(lambda whole: whole[:count].view(shape))

    # -- the process group --

    def _observed(self, result: AsyncResult, kind: str, sent: Tensor) -> AsyncResult:
        event = self.emit_issued(kind, sent.nbytes, result.work)
        return result.then(lambda out: waited(event, out)) if is_observed("waited") else result

    def emit_issued(self, kind: str, nbytes: int, work: Any) -> Event:
        """Tell observers that a collective was issued, and later that it is finished."""
        event = Event(kind, nbytes, self.size, self.mesh_dims, number=next(numbers))
        emit(event, "issued")
        if is_observed("finished"):
            work.get_future().then(lambda _: emit(event, "finished"))
        return event

    def gather_coalesced(self, outs: list[Tensor], pieces: list[Tensor]) -> Any:
        """Issue several all-gathers of flat tensors as one; gives the process group's work."""
        return self.process_group.allgather_into_tensor_coalesced(outs, pieces)

    def _all_gather(self, out: Tensor, piece: Tensor, batch: _Batch | None = None) -> AsyncResult:
        # Flat, because backends compare the shapes of pieces and output.
        flat, piece = as_sendable(out.view(-1)), as_sendable(piece.view(-1))
        target, piece = self._staged(flat, piece)
        if self._order:
            blocks = target.view(self.size, -1)
            work = self.process_group.allgather([[blocks[i] for i in self._order]], [piece])
        else:
            work = self._gather(target, piece) if batch is None else batch.add(self, target, piece)
        result = AsyncResult(work, out, piece)
        return result if target is flat else result.then(lambda whole: _filled(flat, target, whole))

    def _stages(self, tensor: Tensor) -> bool:
        """Whether a tensor travels through CPU memory: gloo sees no other."""
        return tensor.is_cuda and self.is_gloo

    def _staged(self, out: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Where to receive and what to send."""
        if not self._stages(piece):
            return out, piece
        return out.new_empty(out.shape, device="cpu"), piece.to("cpu", copy=True)

    def _send_receive(self, sent: Tensor, there: int, received: Tensor, before: int) -> SendReceive:
        """Both at once: a ring in which each rank first sends and then receives would wait for ever."""
        ops = [
            dist.P2POp(call, tensor, peer=self._global_rank(position), group=self.process_group)
            for call, tensor, position in ((dist.isend, sent, there), (dist.irecv, received, before))
        ]
        return SendReceive(dist.batch_isend_irecv(ops))

    def _global_rank(self, position: int) -> int:
        rank = self._order.index(position) if self._order else position
        return dist.get_global_rank(self.process_group, rank)

    def _gather_coalesced(self, out: Tensor, piece: Tensor) -> Any:
        return self.process_group.allgather_into_tensor_coalesced([out], [piece])

    def _exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncResult:
        out = flat.new_empty(sum(received))
        unit = 1 if flat.dtype in SENDABLE else flat.dtype.itemsize
        return self._all_to_all(out, flat, [n * unit for n in received], [n * unit for n in sent])

    def _all_to_all(self, out: Tensor, pieces: Tensor, received: list[int], sent: list[int]) -> AsyncResult:
        """Move runs of the given lengths; empty lists stand for equal parts."""
        flat, given = as_sendable(out.view(-1)), as_sendable(pieces.view(-1))
        target, given = self._staged(flat, given)
        if self._order:
            result = self._all_to_all_ordered(target, given, received, sent)
            return result.then(lambda moved: out if moved is flat else _filled(flat, moved, out))
        result = AsyncResult(self.process_group.alltoall_base(target, given, received, sent), out, given)
        return result if target is flat else result.then(lambda whole: _filled(flat, target, whole))

    def _all_to_all_ordered(self, out: Tensor, flat: Tensor, received: list[int], sent: list[int]) -> AsyncResult:
        """As the process group counts its ranks: bring the runs into that order, and back."""
        order: Any = self._order
        shares = [flat.numel() // self.size] * self.size
        received, sent = received or shares, sent or shares
        runs = flat.split_with_sizes(sent)
        moved = torch.empty_like(out)
        counts = [received[i] for i in order], [sent[i] for i in order]
        given = torch.cat([runs[i] for i in order])

        def put(moved: Tensor) -> Tensor:
            places = out.split_with_sizes(received)
            for i, run in zip(order, moved.split_with_sizes(counts[0]), strict=True):
                places[i].copy_(run)
            return out

        return AsyncResult(self.process_group.alltoall_base(moved, given, *counts), moved, given).then(put)


def _filled(part: Tensor, staged: Tensor, whole: Tensor) -> Tensor:
    """``whole``, of which ``part`` is the same memory, with what was received elsewhere."""
    part.copy_(staged)
    return whole


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _reduce_scatter_options(op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options
