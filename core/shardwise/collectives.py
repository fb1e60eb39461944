"""Collectives: straight calls of the process groups behind a mesh, for contiguous tensors.

A :class:`Group` is the ranks along one or several mesh dims, in row-major order of their coordinates. Its methods make
up for what backends leave out: dtypes that a backend cannot carry travel as bytes; reductions that it lacks or gets
wrong (max and min of floats: backends drop NaN) are an exchange and a local reduction; gloo sees CPU tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import reduce_stacked
from shardwise.private_torch import is_traced
from shardwise.traced import FunctionalGroup
from shardwise.wire import CARRIED, REAL, average, carrier, is_native

__all__ = ["Event", "Group", "all_reduce", "generation", "group_of", "observe"]


@frozen
class Event:
    """One collective: its kind, the bytes that this rank handed in, the group's size and mesh dims."""

    kind: str
    nbytes: int
    group_size: int
    mesh_dims: tuple[int, ...]


_observers: list[Callable[[Event], None]] = []


@contextmanager
def observe(callback: Callable[[Event], None]) -> Iterator[None]:
    """Call ``callback`` with an :class:`Event` for each collective that this process issues in the block."""
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
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
        self._gloo = backend == "gloo"
        if process_group is None:
            return
        self._functional = FunctionalGroup(process_group, size, position, order, not self._gloo)
        # Named all_gather_single from torch 2.13 on; the coalesced form is the public one that older releases have.
        self._gather = getattr(process_group, "all_gather_single", None) or self._gather_coalesced
        self._sum_options = {kind: _all_reduce_options(op) for kind, op in _REDUCE_OPS.items()}
        self._scatter_options = {kind: _reduce_scatter_options(op) for kind, op in _REDUCE_OPS.items()}

    def __repr__(self) -> str:
        return f"Group(mesh_dims={self.mesh_dims}, size={self.size}, position={self.position})"

    # -- movement --

    def all_gather_into(self, out: Tensor, piece: Tensor) -> Tensor:
        """Fill ``out`` with the pieces of all ranks, one behind the other; the pieces are of one shape."""
        if is_traced(piece):
            return self._functional.all_gather(piece).view(out.shape)
        if _observers:
            self._tell("all_gather", piece.nbytes)
        self._all_gather(out, piece)
        return out

    def all_gather(self, piece: Tensor) -> Tensor:
        """The pieces of all ranks, stacked."""
        return self.all_gather_into(piece.new_empty((self.size, *piece.shape)), piece)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """Send ``pieces[i]`` to rank ``i``; the result stacks what each rank sent here, all of one shape."""
        if is_traced(pieces):
            return self._functional.all_to_all(pieces)
        if _observers:
            self._tell("all_to_all", pieces.nbytes)
        out = torch.empty_like(pieces)
        self._all_to_all(out.view(-1), pieces.view(-1), [], [])
        return out

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive runs of a flat tensor, ``sent[i]`` elements to rank ``i``; ``received`` likewise."""
        if is_traced(flat):
            return self._functional.exchange(flat, sent, received)
        if _observers:
            self._tell("all_to_all", flat.nbytes)
        return self._exchange(flat, sent, received)

    # -- reduction --

    def all_reduce_(self, tensor: Tensor, kind: str) -> Tensor:
        """The reduction over all ranks; may use ``tensor``'s memory for it."""
        if is_traced(tensor):
            return self._functional.all_reduce(tensor, kind)
        if _observers:
            self._tell("all_reduce", tensor.nbytes)
        if not is_native(kind, tensor.dtype):
            return self._reduce_by_moving(tensor, kind)
        flat = tensor.view(-1).view(REAL[tensor.dtype]) if tensor.dtype in REAL else tensor
        if self._gloo and tensor.is_cuda:
            staged = flat.cpu()
            self.process_group.allreduce([staged], self._sum_options[kind]).wait()
            flat.copy_(staged)
        else:
            self.process_group.allreduce([flat], self._sum_options[kind]).wait()
        return average(tensor, self.size) if kind == "avg" else tensor

    def reduce_scatter(self, pieces: Tensor, kind: str) -> Tensor:
        """The reduction of all ranks' ``pieces[position]``; the pieces are of one shape."""
        if is_traced(pieces):
            return self._functional.reduce_scatter(pieces, kind)
        if _observers:
            self._tell("reduce_scatter", pieces.nbytes)
        # gloo's own is an all-reduce of everything.
        if self._gloo or self._order or not is_native(kind, pieces.dtype) or pieces.dtype in REAL:
            out = torch.empty_like(pieces)
            self._all_to_all(out.view(-1), pieces.view(-1), [], [])
            return self._reduce(out, kind)
        result = pieces.new_empty(pieces.shape[1:])
        flat = [result.view(-1)], [pieces.view(-1)]
        self.process_group.reduce_scatter_tensor_coalesced(*flat, self._scatter_options[kind]).wait()
        return average(result, self.size) if kind == "avg" else result

    def reduce_scatter_uneven(self, flat: Tensor, sent: Sequence[int], kind: str) -> Tensor:
        """As :meth:`reduce_scatter` for flat pieces of ``sent[i]`` elements; the result is flat."""
        if is_traced(flat):
            return self._functional.reduce_scatter_uneven(flat, sent, kind)
        if _observers:
            self._tell("reduce_scatter", flat.nbytes)
        here = sent[self.position]
        return self._reduce(self._exchange(flat, sent, [here] * self.size).view(self.size, here), kind)

    def _reduce(self, stacked: Tensor, kind: str) -> Tensor:
        if not is_native(kind, stacked.dtype):
            return reduce_stacked(stacked, kind)
        if kind in ("max", "min"):
            return stacked.amax(0) if kind == "max" else stacked.amin(0)
        found = stacked.prod(0, dtype=stacked.dtype) if kind == "product" else stacked.sum(0, dtype=stacked.dtype)
        return average(found, self.size) if kind == "avg" else found

    def _reduce_by_moving(self, tensor: Tensor, kind: str) -> Tensor:
        """Every rank reduces its part of the elements and the parts are gathered; small tensors are gathered whole."""
        if tensor.nbytes * self.size <= _SMALL:
            gathered = tensor.new_empty((self.size, *tensor.shape))
            self._all_gather(gathered, tensor)
            return reduce_stacked(gathered, kind)
        share = -(-tensor.numel() // self.size)
        padded = tensor.new_zeros(share * self.size)
        padded[: tensor.numel()] = tensor.view(-1)
        received = torch.empty_like(padded)
        self._all_to_all(received, padded, [], [])
        self._all_gather(padded, reduce_stacked(received.view(self.size, share), kind))
        return padded[: tensor.numel()].view(tensor.shape)

    # -- the process group --

    def _tell(self, kind: str, nbytes: int) -> None:
        event = Event(kind, nbytes, self.size, self.mesh_dims)
        for callback in tuple(_observers):
            callback(event)

    def _all_gather(self, out: Tensor, piece: Tensor) -> None:
        # Flat, because backends compare the shapes of pieces and output.
        out, piece = carrier(out.view(-1)), carrier(piece.view(-1))
        target = out.new_empty(out.shape, device="cpu") if self._gloo and piece.is_cuda else out
        piece = piece.to(target.device)
        if self._order:
            blocks = target.view(self.size, -1)
            self.process_group.allgather([[blocks[i] for i in self._order]], [piece]).wait()
        else:
            self._gather(target, piece).wait()
        if target is not out:
            out.copy_(target)

    def _gather_coalesced(self, out: Tensor, piece: Tensor) -> Any:
        return self.process_group.allgather_into_tensor_coalesced([out], [piece])

    def _exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = flat.new_empty(sum(received))
        unit = 1 if flat.dtype in CARRIED else flat.dtype.itemsize
        self._all_to_all(out, flat, [n * unit for n in received], [n * unit for n in sent])
        return out

    def _all_to_all(self, out: Tensor, flat: Tensor, received: list[int], sent: list[int]) -> None:
        """Move runs of the given lengths; empty lists stand for equal parts."""
        out, flat = carrier(out), carrier(flat)
        target = out.new_empty(out.shape, device="cpu") if self._gloo and flat.is_cuda else out
        flat = flat.to(target.device)
        if self._order:
            self._all_to_all_ordered(target, flat, received, sent)
        else:
            self.process_group.alltoall_base(target, flat, received, sent).wait()
        if target is not out:
            out.copy_(target)

    def _all_to_all_ordered(self, out: Tensor, flat: Tensor, received: list[int], sent: list[int]) -> None:
        """As the process group counts its ranks: bring the runs into that order, and back."""
        order: Any = self._order
        shares = [flat.numel() // self.size] * self.size
        received, sent = received or shares, sent or shares
        runs = flat.split_with_sizes(sent)
        moved = torch.empty_like(out)
        counts = [received[i] for i in order], [sent[i] for i in order]
        self.process_group.alltoall_base(moved, torch.cat([runs[i] for i in order]), *counts).wait()
        places = out.split_with_sizes(received)
        for i, run in zip(order, moved.split_with_sizes(counts[0]), strict=True):
            places[i].copy_(run)


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _reduce_scatter_options(op: Any) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


# -- the groups of a mesh --------------------------------------------------------------------------------------------

_groups: dict[tuple[DeviceMesh, tuple[int, ...]], Group] = {}
_world: Any = None


def generation() -> Any:
    """The default process group; when it is another than before, all groups that were made before are forgotten."""
    global _world  # noqa: PLW0603  # one process has one default group at a time
    now = dist.group.WORLD
    if now is not _world:
        _groups.clear()
        _world = now
    return now


def group_of(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Group:
    """The group of this rank over some mesh dims, its ranks in row-major order of these dims as given.

    Made once. Over several mesh dims the first call makes a process group: all ranks of the group must make it alike.
    """
    generation()
    dims = tuple(mesh_dims)
    known = _groups.get((mesh, dims))
    if known is None:
        known = _groups[mesh, dims] = _make_group(mesh, dims)
    return known


def _make_group(mesh: DeviceMesh, dims: tuple[int, ...]) -> Group:
    where = mesh.get_coordinate()
    if where is None:
        raise ValueError("this rank is not part of the mesh")
    others = [m for m in range(mesh.ndim) if m not in dims]
    # mesh_dims in front, this rank's coordinate on all others: the ranks of the group, row-major.
    along = mesh.mesh.permute(*dims, *others).reshape(*(mesh.size(m) for m in dims), -1)
    column = 0
    for m in others:
        column = column * mesh.size(m) + where[m]
    ranks = along[..., column].flatten().tolist()
    position = ranks.index(dist.get_rank())
    if len(ranks) == 1:
        return Group(None, 1, 0, dims, "", None)
    process_group = _process_group(mesh, dims, ranks)
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config(process_group)).split(","))
    # Process groups count their ranks in ascending order, whatever order a mesh has them in.
    order = None if ranks == sorted(ranks) else tuple(ranks.index(rank) for rank in sorted(ranks))
    return Group(process_group, len(ranks), position, dims, backends.get(mesh.device_type, ""), order)


def _process_group(mesh: DeviceMesh, dims: tuple[int, ...], ranks: list[int]) -> Any:
    real = [m for m in dims if mesh.size(m) > 1]
    if len(real) == 1:
        return mesh.get_group(real[0])
    if sorted(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(sorted(ranks), use_local_synchronization=True)


def all_reduce(tensor: Tensor, kind: str, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> Tensor:
    """The reduction of ``tensor`` (any strides) over some mesh dims, in new memory; ``tensor`` is left as it is."""
    own = tensor.clone(memory_format=torch.contiguous_format)
    group = group_of(mesh, mesh_dims)
    return own if group.size == 1 or own.numel() == 0 else group.all_reduce_(own, kind)
