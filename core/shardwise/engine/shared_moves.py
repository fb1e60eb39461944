"""Operands that are moved once: what was reduced or gathered for one consumer is there for the next.

See :mod:`shardwise.kernel.kept_moves` for what is kept, and how the ranks stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import torch

from shardwise.comm.agreement import raise_unless_equal
from shardwise.comm.events import Event, emit, is_observed
from shardwise.comm.packing import Run
from shardwise.comm.redistribute import runner
from shardwise.kernel.kept_moves import KeptMove, has_moves, kept_moves, moves_of
from shardwise.kernel.local_strides import is_dense
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Kind
from shardwise.kernel.spec import SymbolicSpec, TensorSpec
from shardwise.planning.cost import KINDS
from shardwise.planning.path import Step, shortest_path
from shardwise.private_torch.dispatch import base_of, memory_of
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.tracing import is_recorded
from shardwise.private_torch.trees import tree_map_only
from shardwise.settings import read_settings

__all__ = [
    "REUSED",
    "SharedMove",
    "checks_ranks",
    "compare_kept",
    "held_moves",
    "keeping_moves",
    "operand_move",
    "results_apart",
]

Move = Callable[[torch.Tensor, Any], torch.Tensor]

REUSED = "reused"
"""The phase of the event of a collective that is not issued, because what it would return is there."""


class SharedMove:
    """Brings an operand to another layout by collectives, unless it was brought there just before.

    Called with the local tensor and its wrapper, as :attr:`shardwise.kernel.plan.Plan.redistributes` says.
    """

    __slots__ = ("_dst", "_nbytes", "_run", "_src")

    def __init__(self, src: TensorSpec, dst: TensorSpec, run: Run) -> None:
        self._src = src
        self._dst = dst
        self._run = run
        # Of rank 0, which has the largest part: a number that is the same on every rank.
        self._nbytes = prod(dst.local_shape((0,) * dst.mesh.ndim)) * dst.dtype.itemsize

    def __call__(self, local: torch.Tensor, tensor: Any) -> torch.Tensor:
        if self._nbytes > kept_moves.limit or is_recorded(local):
            return self._run(local)
        root = _root(tensor, self._src)
        moves = None if root is None else moves_of(root)
        if moves is None or _is_captured(local):
            return self._run(local)
        source, key, stream = root._local_tensor, (self._src, self._dst), _stream(local)
        kept = moves.get(key)
        is_kept = kept is not None and kept.holds(source, stream)
        if checks_ranks():
            compare_kept(self._src, [is_kept])
        if is_kept:
            assert kept is not None
            assert kept.local is not None
            if is_observed(REUSED):
                self._tell()
            return kept.local
        kept_moves.make_room(self._nbytes)
        moved = self._run(local)
        moves[key] = kept = KeptMove(source, moved, self._dst, stream)
        kept_moves.add(kept, self._nbytes)
        return moved

    def _tell(self) -> None:
        for step in _collectives(self._src, self._dst):
            ranks = prod(self._src.mesh_shape[m] for m in step.mesh_dims)
            emit(Event(step.kind, step.held, ranks, step.mesh_dims), REUSED)


def compare_kept(spec: TensorSpec, kept: Sequence[int]) -> None:
    """Have the ranks compare how much they keep for the operands of a call, of which one has this spec."""
    mesh: Any = spec.mesh
    raise_unless_equal(
        str([int(size) for size in kept]),
        mesh,
        f"redistribute {spec} for an op",
        "what earlier ops were given" if any(kept) else "nothing from an earlier op, or has written its part since",
        "Write to parts (to_local()) on every rank or on none, or set SHARDWISE_KEEP_MOVED=0.",
    )


def _root(tensor: Any, spec: TensorSpec) -> Any:
    """The tensor with which moves of a tensor of this spec are kept: itself, or its base. None if none are kept."""
    if tensor is None:
        return None
    base: Any = base_of(tensor)
    if base is None:
        return None if _is_parameter(tensor) or tensor.is_inference() else tensor
    return base if _is_all_of(spec, base._spec) and not _is_parameter(base) and not base.is_inference() else None


@lru_cache(maxsize=4096)
def _is_all_of(view: TensorSpec, base: TensorSpec) -> bool:
    """Whether a view has all elements of its base, each once. Then shape and strides say which view it is."""
    of, has = base.tensor_meta, view.tensor_meta
    is_plain = of.dtype is has.dtype and not of.dtype.is_complex
    return is_plain and of.numel == has.numel and is_dense(of) and is_dense(has)


def held_moves(tensor: Any) -> dict[TensorSpec, KeptMove] | None:
    """What holds of what is kept for a tensor, by layout."""
    base: Any = base_of(tensor)
    if not has_moves(tensor if base is None else base):  # most operands: nothing else is looked at
        return None
    spec, local = tensor._spec.untagged, tensor._local_tensor
    root = _root(tensor, spec)
    moves = None if root is None else moves_of(root)
    if moves is None or is_recorded(local) or _is_captured(local):
        return None
    stream = _stream(local)
    source = root._local_tensor
    return {dst: kept for (src, dst), kept in moves.items() if src is spec and kept.holds(source, stream)}


def operand_move(src: TensorSpec, dst: TensorSpec, *, is_shared: bool) -> Move:
    """What brings an operand to another layout in a plan: for its next consumers as well, if ``is_shared``."""
    _start()
    run = runner(src, dst)
    if is_shared and not isinstance(src, SymbolicSpec) and _collectives(src, dst):
        return SharedMove(src.untagged, dst.untagged, run)
    return lambda local, _tensor: run(local)


def results_apart(plan: Plan) -> Plan:
    """The plan, with results that never share memory with an operand that is kept for others."""
    args = plan.schema.signature.args
    tensors = [k for k, arg in enumerate(args) if arg.kind in (Kind.TENSOR, Kind.TENSORS)]
    shared = [
        (k, args[k].name, [i for i, step in move if isinstance(step, SharedMove)] if isinstance(move, list) else None)
        for k, move in zip(tensors, plan.redistributes or (), strict=False)
        if isinstance(move, SharedMove) or (isinstance(move, list) and any(isinstance(m, SharedMove) for _, m in move))
    ]
    if shared:
        plan.run_by(partial(_apart, plan.call, shared))
    return plan


def _apart(call: Callable[..., Any], shared: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    out = call(*args, **kwargs)
    memories = set()
    for k, name, places in shared:
        value = args[k] if k < len(args) else kwargs[name]
        memories.update([memory_of(value)] if places is None else [memory_of(value[i]) for i in places])
    if type(out) is torch.Tensor:
        return out if memory_of(out) not in memories else out.clone()
    if any(memory_of(t) in memories for t in tensors_in(out)):
        return tree_map_only(torch.Tensor, lambda t: t.clone() if memory_of(t) in memories else t, out)
    return out


@contextmanager
def keeping_moves(limit: int) -> Iterator[None]:
    """Keep at most so many bytes of moved operands meanwhile, whatever the settings say. Every rank must enter it."""
    _start()
    before = kept_moves.limit
    kept_moves.clear()
    kept_moves.limit = limit
    try:
        yield
    finally:
        kept_moves.clear()
        kept_moves.limit = before


@cache
def _start() -> None:
    """Read the limit from the settings, once."""
    kept_moves.limit = read_settings().keep_moved


@cache
def checks_ranks() -> bool:
    """Whether the ranks compare what they keep at every use."""
    return read_settings().check_ranks


@lru_cache(maxsize=4096)
def _collectives(src: TensorSpec, dst: TensorSpec) -> tuple[Step, ...]:
    return tuple(step for step in shortest_path(src, dst).steps if step.kind in KINDS and step.held)


_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # that of MeshTensor is slower


def _is_parameter(root: Any) -> bool:
    """Whether a tensor lives as long as the program. It is gathered for one use, and would fill what is kept."""
    return (root.is_leaf and _requires_grad(root)) or getattr(root, "_is_param", False)


def _is_captured(local: torch.Tensor) -> bool:
    """Whether ops go into a CUDA graph, which runs again after the source has new values."""
    return local.is_cuda and not is_rehearsing() and torch.cuda.is_current_stream_capturing()


def _stream(local: torch.Tensor) -> Any:
    """The stream on which a tensor is made now; None where there are no streams."""
    if local.device.type in ("cpu", "meta") or is_rehearsing():
        return None
    return torch.accelerator.current_stream(local.device)
