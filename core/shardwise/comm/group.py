"""Groups: the ranks along one or several mesh dims, with direct calls of their process group.

The methods of a :class:`Group` make up for what backends lack. A dtype that a backend cannot send is sent as bytes. A
reduction that a backend lacks or computes wrongly (max and min of floats: backends drop NaN) is an exchange and a local
reduction. Tensors of other devices pass through CPU memory for gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.async_result import AsyncResult, SendReceive
from shardwise.comm.coalescing import Batch, open_batch
from shardwise.comm.collective_log import CollectiveLog, call_code
from shardwise.comm.collectives import Collectives
from shardwise.comm.events import Event, ObservedWork, emit, is_observed, new_event, observers, waited
from shardwise.comm.graph_group import BACKEND_REDUCTIONS, GraphGroup
from shardwise.kernel.reductions import (
    REAL,
    REDUCE_OPS,
    SENDABLE,
    add_up,
    as_sendable,
    average,
    is_native,
    reduce_stacked,
    scaled_down,
)
from shardwise.private_torch.tracing import is_recorded

__all__ = ["REDUCE_OP_OF", "Group"]

REDUCE_OP_OF = {reduction: getattr(dist.ReduceOp, name.upper()) for reduction, name in BACKEND_REDUCTIONS.items()}
# Up to this many gathered bytes one all-gather takes less time than an exchange and an all-gather: latency decides.
_SMALL = 1 << 16


class Group(Collectives):
    """The ranks along some mesh dims; :attr:`in_graph` is the same group while a graph is traced (see :meth:`of`)."""

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
        # order[i] is the position here of the process group's rank i; None, the usual case, where they are the same.
        self._order = order
        self.is_gloo = backend == "gloo"
        self.held: tuple[Any, Any] | None = None
        self.log = CollectiveLog()  # `watch` puts that of the process group here
        self._codes = {kind: call_code(kind, mesh_dims) for kind in ("all_gather", "all_to_all", "exchange", "shift")}
        self._all_reduce_codes, self._scatter_codes = (
            {reduction: call_code(f"{kind} {reduction}", mesh_dims) for reduction in REDUCE_OPS}
            for kind in ("all_reduce", "reduce_scatter")
        )
        if process_group is None:
            return
        self.in_graph = GraphGroup(process_group, size, position, mesh_dims, order, not self.is_gloo)
        # torch has all_gather_single from 2.13 on; earlier releases have the coalesced form.
        self._gather: Callable[..., Any] = getattr(process_group, "all_gather_single", None) or (
            lambda out, piece: process_group.allgather_into_tensor_coalesced([out], [piece])
        )
        self._sum_options = {kind: _options(dist.AllreduceOptions, op) for kind, op in REDUCE_OP_OF.items()}
        self._sums_options = {kind: _options(dist.AllreduceCoalescedOptions, op) for kind, op in REDUCE_OP_OF.items()}
        self._scatter_options = {kind: _options(dist.ReduceScatterOptions, op) for kind, op in REDUCE_OP_OF.items()}

    def __repr__(self) -> str:
        return f"Group(mesh_dims={self.mesh_dims}, size={self.size}, position={self.position})"

    def rank_at(self, position: int) -> int:
        """The process group's rank of a position here."""
        return position if self._order is None else self._order.index(position)

    def hold(self, released: Callable[[], object]) -> None:
        """Call ``released()`` before the next collective of this group is issued.

        What issues collectives is replaced until then, so that a group that is not held has nothing to look at.
        """
        if self.held is not None or self.process_group is None:
            return
        process_group, gather = self.held = self.process_group, self._gather

        def release() -> Any:
            self.release()
            released()
            return process_group

        self.process_group = _Held(release)
        self._gather = lambda *args: (release(), gather(*args))[1]

    def release(self) -> None:
        """Issue collectives as before :meth:`hold`."""
        if self.held is not None:
            (self.process_group, self._gather), self.held = self.held, None

    def of(self, tensor: Tensor) -> Collectives:
        """The group whose collectives can take a tensor: this one, or that of the graph if it is traced."""
        return self.in_graph if is_recorded(tensor) else self

    # -- movement --

    def start_all_gather(self, out: Tensor, piece: Tensor) -> AsyncResult:
        batch = open_batch.batch
        if batch is None or self._order:
            self.log.record(self._codes["all_gather"], piece.nbytes)
        result = self._all_gather(out, piece, batch)
        # Coalesced gathers are reported as one.
        return self._observed(result, "all_gather", piece) if observers and (batch is None or self._order) else result

    def start_all_to_all(self, pieces: Tensor) -> AsyncResult:
        self.log.record(self._codes["all_to_all"], pieces.nbytes)
        result = self._all_to_all(torch.empty_like(pieces), pieces, [], [])
        return self._observed(result, "all_to_all", pieces) if observers else result

    def start_exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncResult:
        self.log.record_uneven(self._codes["exchange"], flat.nbytes)
        result = self._exchange(flat, sent, received)
        return self._observed(result, "all_to_all", flat) if observers else result

    def start_shift(self, flat: Tensor, by: int, count: int) -> AsyncResult:
        """Point to point; an exchange in which the other ranks send nothing, where tensors pass through CPU memory."""
        there, before = (self.position + by) % self.size, (self.position - by) % self.size
        if self._stages(flat):
            sent, received = [0] * self.size, [0] * self.size
            sent[there], received[before] = flat.numel(), count
            return self.start_exchange(flat, sent, received)
        self.log.record_uneven(self._codes["shift"], flat.nbytes)
        out = flat.new_empty(count)
        works = self._send_receive(as_sendable(flat), there, as_sendable(out), before)
        result = AsyncResult(works, out, flat, self.process_group, self.log)
        return self._observed(result, "shift", flat) if observers else result

    # -- reduction --

    def start_all_reduce(self, tensor: Tensor, kind: str) -> AsyncResult:
        batch = open_batch.batch
        if not is_native(kind, tensor.dtype):
            self.log.record(self._all_reduce_codes[kind], tensor.nbytes)
            batch, result = None, self._reduce_by_moving(tensor, kind)
        else:
            if batch is None:
                self.log.record(self._all_reduce_codes[kind], tensor.nbytes)
            if kind == "avg":
                tensor.copy_(scaled_down(tensor, self.size))
            flat = tensor.view(-1).view(REAL[tensor.dtype]) if tensor.dtype in REAL else tensor
            staged = flat.to("cpu", copy=True) if self._stages(flat) else flat
            if batch is None:
                work = self.process_group.allreduce([staged], self._sum_options[kind])
            else:
                work = batch.add(self, "all_reduce", staged, staged, kind)
            result = AsyncResult(work, tensor, staged, self.process_group, self.log)
            if staged is not flat:
                result.then(lambda whole: _filled(flat, staged, whole))
            if kind == "avg":
                result = self._averaged(result)
        # Coalesced collectives are reported as one.
        return self._observed(result, "all_reduce", tensor) if observers and batch is None else result

    def start_reduce_scatter(self, pieces: Tensor, kind: str) -> AsyncResult:
        batch = open_batch.batch if self._may_coalesce(pieces, kind) else None
        if batch is None:
            self.log.record(self._scatter_codes[kind], pieces.nbytes)
        # gloo's reduce-scatter is an all-reduce of all pieces.
        if self.is_gloo or self._order or not is_native(kind, pieces.dtype) or pieces.dtype in REAL:
            out = torch.empty_like(pieces)
            if batch is None:
                result = self._all_to_all(out, pieces, [], [])
            else:
                work = batch.add(self, "reduce_scatter", out, pieces, kind)
                result = AsyncResult(work, out, pieces, self.process_group, self.log)
            result.then(lambda stacked: self._reduce(stacked, kind))
        else:
            out = pieces.new_empty(pieces.shape[1:])
            added = scaled_down(pieces, self.size) if kind == "avg" else pieces
            flat, parts = out.view(-1), added.view(-1)
            if batch is None:
                work = self._reduce_scatter([flat], [parts], kind)
            else:
                work = batch.add(self, "reduce_scatter", flat, parts, kind)
            result = AsyncResult(work, out, added, self.process_group, self.log)
            if kind == "avg":
                result = self._averaged(result)
        return self._observed(result, "reduce_scatter", pieces) if observers and batch is None else result

    def _may_coalesce(self, pieces: Tensor, kind: str) -> bool:
        """Whether a reduce-scatter joins others: its pieces are sent as they are, in the process group's order."""
        return (
            not self._order
            and not self._stages(pieces)
            and is_native(kind, pieces.dtype)
            and pieces.dtype in SENDABLE
            and pieces.dtype not in REAL
        )

    def _reduce_scatter(self, outs: list[Tensor], pieces: list[Tensor], kind: str) -> Any:
        return self.process_group.reduce_scatter_tensor_coalesced(outs, pieces, self._scatter_options[kind])

    def start_reduce_scatter_uneven(self, flat: Tensor, sent: Sequence[int], kind: str) -> AsyncResult:
        self.log.record(self._scatter_codes[kind], flat.nbytes)
        share = sent[self.position]
        result = self._exchange(flat, sent, [share] * self.size)
        result.then(lambda received: self._reduce(received.view(self.size, share), kind))
        return self._observed(result, "reduce_scatter", flat) if observers else result

    def _averaged(self, total: AsyncResult) -> AsyncResult:
        return total.then(lambda whole: average(whole, self.size))

    def _reduce(self, stacked: Tensor, kind: str) -> Tensor:
        if not is_native(kind, stacked.dtype):
            return reduce_stacked(stacked, kind)
        if kind in ("max", "min"):
            return stacked.amax(0) if kind == "max" else stacked.amin(0)
        if kind == "avg":
            return average(add_up(scaled_down(stacked, self.size)), self.size)
        return stacked.prod(0, dtype=stacked.dtype) if kind == "product" else add_up(stacked)

    def _reduce_by_moving(self, tensor: Tensor, kind: str) -> AsyncResult:
        """An all-reduce that no backend has: each rank reduces its share of the elements, then all gather the shares.

        Small tensors are gathered whole and reduced on every rank.
        """
        if tensor.nbytes * self.size <= _SMALL:
            gathered = tensor.new_empty((self.size, *tensor.shape))
            return self._all_gather(gathered, tensor).then(lambda stacked: reduce_stacked(stacked, kind))
        count, shape = tensor.numel(), tensor.shape
        share = -(-count // self.size)
        padded = tensor.new_zeros(share * self.size)
        padded[:count] = tensor.view(-1)
        # Wait here: the gather is the next collective, and none may be issued while a result is waited for.
        received = self._all_to_all(torch.empty_like(padded), padded, [], []).wait()
        reduced = reduce_stacked(received.view(self.size, share), kind)
        return self._all_gather(padded, reduced).then(lambda whole: whole[:count].view(shape))

    # -- the process group --

    def _observed(self, result: AsyncResult, kind: str, sent: Tensor) -> AsyncResult:
        event = self.emit_issued(kind, sent.nbytes, result.work)
        if is_observed("waiting") and result.work is not None:
            result.work = ObservedWork(result.work, event)
        return result.then(lambda out: waited(event, out)) if is_observed("waited") else result

    def emit_issued(self, kind: str, nbytes: int, work: Any) -> Event:
        """Emit the event of a collective that was issued, and another one when it is finished."""
        event = new_event(kind, nbytes, self.size, self.mesh_dims)
        if is_observed("finished"):  # first, since who observes the other may take its time
            work.get_future().then(lambda _: emit(event, "finished"))
        emit(event, "issued")
        return event

    def issue_coalesced(self, kind: str, reduction: str, outs: list[Tensor], pieces: list[Tensor]) -> Any:
        """Issue several collectives of one kind as one; the result is a work."""
        codes = {"all_reduce": self._all_reduce_codes, "reduce_scatter": self._scatter_codes}.get(kind)
        self.log.record(self._codes[kind] if codes is None else codes[reduction], sum(p.nbytes for p in pieces))
        work = self._issue_coalesced(kind, reduction, outs, pieces)
        if self.log.holds_work:
            self.log.work = work
        return work

    def _issue_coalesced(self, kind: str, reduction: str, outs: list[Tensor], pieces: list[Tensor]) -> Any:
        if kind == "all_gather":
            return self.process_group.allgather_into_tensor_coalesced(outs, pieces)
        if kind == "all_reduce":
            return self.process_group.allreduce_coalesced(pieces, self._sums_options[reduction])
        if not self.is_gloo:
            return self._reduce_scatter(outs, pieces, reduction)
        # One exchange of what goes to each rank, of all tensors.
        packed = torch.cat([piece.view(self.size, -1) for piece in pieces], 1)
        received = torch.empty_like(packed)
        return _Unpacked(self.process_group.alltoall_base(received, packed, [], []), received, packed, outs)

    def _all_gather(self, out: Tensor, piece: Tensor, batch: Batch | None = None) -> AsyncResult:
        # Flat, because backends compare the shapes of pieces and output.
        flat, piece = as_sendable(out.view(-1)), as_sendable(piece.view(-1))
        target, piece = self._staged(flat, piece)
        if self._order:
            blocks = target.view(self.size, -1)
            work = self.process_group.allgather([[blocks[i] for i in self._order]], [piece])
        else:
            work = self._gather(target, piece) if batch is None else batch.add(self, "all_gather", target, piece)
        result = AsyncResult(work, out, piece, self.process_group, self.log)
        return result if target is flat else result.then(lambda whole: _filled(flat, target, whole))

    def _stages(self, tensor: Tensor) -> bool:
        """Whether a tensor passes through CPU memory, because gloo sends no other."""
        return self.is_gloo and tensor.is_cuda

    def _staged(self, out: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor to receive into and the tensor to send."""
        if not self._stages(piece):
            return out, piece
        return out.new_empty(out.shape, device="cpu"), piece.to("cpu", copy=True)

    def _send_receive(self, sent: Tensor, there: int, received: Tensor, before: int) -> SendReceive:
        """Send and receive at once: a ring in which every rank first sends and then receives would wait for ever."""
        if self.held is not None:
            self.process_group.size()  # any use of what stands for the process group
        ops = []
        for call, tensor, position in ((dist.isend, sent, there), (dist.irecv, received, before)):
            rank = self.rank_at(position)
            peer = dist.get_global_rank(self.process_group, rank)
            ops.append(dist.P2POp(call, tensor, peer=peer, group=self.process_group))
        return SendReceive(dist.batch_isend_irecv(ops))

    def _exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncResult:
        out = flat.new_empty(sum(received))
        unit = 1 if flat.dtype in SENDABLE else flat.dtype.itemsize
        return self._all_to_all(out, flat, [n * unit for n in received], [n * unit for n in sent])

    def _all_to_all(self, out: Tensor, pieces: Tensor, received: list[int], sent: list[int]) -> AsyncResult:
        """Exchange runs of these numbers of elements; empty lists mean equal parts."""
        flat, outgoing = as_sendable(out.view(-1)), as_sendable(pieces.view(-1))
        target, outgoing = self._staged(flat, outgoing)
        if self._order:
            result = self._all_to_all_ordered(target, outgoing, received, sent)
            return result.then(lambda moved: out if moved is flat else _filled(flat, moved, out))
        work = self.process_group.alltoall_base(target, outgoing, received, sent)
        result = AsyncResult(work, out, outgoing, self.process_group, self.log)
        return result if target is flat else result.then(lambda whole: _filled(flat, target, whole))

    def _all_to_all_ordered(self, out: Tensor, flat: Tensor, received: list[int], sent: list[int]) -> AsyncResult:
        """Bring the runs into the process group's order of ranks, exchange them, and bring them back."""
        order: Any = self._order
        shares = [flat.numel() // self.size] * self.size
        received, sent = received or shares, sent or shares
        runs = flat.split_with_sizes(sent)
        incoming, outgoing = torch.empty_like(out), torch.cat([runs[i] for i in order])
        counts = [received[i] for i in order], [sent[i] for i in order]

        def put(incoming: Tensor) -> Tensor:
            parts = out.split_with_sizes(received)
            for i, run in zip(order, incoming.split_with_sizes(counts[0]), strict=True):
                parts[i].copy_(run)
            return out

        work = self.process_group.alltoall_base(incoming, outgoing, *counts)
        return AsyncResult(work, incoming, outgoing, self.process_group, self.log).then(put)


class _Unpacked:
    """The work of an exchange of packed tensors; the wait puts what was received into theirs."""

    def __init__(self, work: Any, received: Tensor, sent: Tensor, outs: Sequence[Tensor]) -> None:
        self._work = work
        self._received, self._sent = received, sent
        self._outs = outs

    def get_future(self) -> Any:
        return self._work.get_future()

    def wait(self) -> None:
        self._work.wait()
        size = len(self._received)
        parts = self._received.split_with_sizes([out.numel() // size for out in self._outs], 1)
        for out, part in zip(self._outs, parts, strict=True):
            out.view(size, -1).copy_(part)


class _Held:
    """Stands for a process group until something is asked of it."""

    def __init__(self, release: Callable[[], Any]) -> None:
        self._release = release

    def __getattr__(self, name: str) -> Any:
        return getattr(self._release(), name)


def _filled(part: Tensor, staged: Tensor, whole: Tensor) -> Tensor:
    """Copy received elements into ``part``, a view of ``whole``, and return ``whole``."""
    part.copy_(staged)
    return whole


def _options(cls: Any, op: Any) -> Any:
    options = cls()
    options.reduceOp = op
    return options
