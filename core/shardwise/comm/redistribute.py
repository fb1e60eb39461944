"""Redistribution: run a transition on this rank's local tensor.

A runner is resolved once per pair of specs: groups, shapes, cuts and paddings of this rank are known before it first
runs. Runners never modify their input and their result owns its memory: writing to one never shows in the other, and a
slice is a copy. They work below autograd, on plain local tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

from attrs import frozen
from torch import Tensor

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.meeting import meet
from shardwise.comm.packing import Run
from shardwise.comm.run_step import Start, StepRunner, step_runner
from shardwise.kernel.placements import Placement, Shard, check_placements, shard
from shardwise.kernel.spec import SymbolicSpec, TensorMeta, TensorSpec, hinted, in_numbers, memory_order
from shardwise.kernel.world import world_number
from shardwise.planning.path import Step, shortest_path
from shardwise.private_torch.tracing import outside_modes

__all__ = ["Route", "runner", "redistribute_local", "route"]

_log = logging.getLogger(__name__)


@frozen
class Route:
    """How a tensor gets from one layout to another: ``run`` its local tensor, or ``start`` what is communicated last.

    ``start`` is None when nothing is communicated; ``stays`` says that the placements are the same.
    """

    target: TensorSpec
    stays: bool
    run: Run
    start: Start | None


def redistribute_local(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """The local tensor of this rank under ``dst``, from the one under ``src``; all ranks must call it alike.

    ``local`` has the shape ``src.local_shape()`` and any strides; the result has ``dst.local_shape()`` and strides in
    the order of the global tensor's. When the placements are the same, ``local`` itself comes back. Raises what
    :func:`shardwise.planning.path.shortest_path` raises, before anything is communicated.
    """
    return local if src is dst else runner(src, dst)(local)


def runner(src: TensorSpec, dst: TensorSpec) -> Run:
    """The function that redistributes local tensors from ``src`` to ``dst``; see :func:`redistribute_local`.

    All ranks of the mesh must ask for it alike: it may have to make a process group.
    """
    return _runner_of(src, dst).run


def _runner_of(src: TensorSpec, dst: TensorSpec) -> StepRunner:
    if not isinstance(src, SymbolicSpec):
        return _cached_runner(src, dst, world_number())
    # What holds for symbols is of no use to another graph. Nothing starts early in a graph, so there is no start.
    return StepRunner(lambda local: _run_symbolic(local, src, dst))


def _run_symbolic(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """Move by symbols, or where torch cannot write what is to be done in symbols, by numbers."""
    try:
        return _build_runner(src, dst).run(local)
    except Exception as error:  # noqa: BLE001  # whatever torch raises for a formula
        _log.info("%s is redistributed for its sizes alone: %s: %s", src, type(error).__name__, error)
        with outside_modes():
            src, dst = in_numbers(src), in_numbers(dst)
        return _cached_runner(src, dst, world_number()).run(local)


def route(src: TensorSpec, placements: Sequence[Placement]) -> Route:
    """The way from ``src`` to other placements of the same tensor, as a user writes them.

    Raises what :func:`check_placements` and :func:`shardwise.planning.path.shortest_path` raise.
    """
    given = tuple(placements)
    if isinstance(src, SymbolicSpec):
        return _build_route(src, check_placements(given, src.mesh.ndim, src.ndim))
    try:
        return _cached_route(src, given, world_number())
    except TypeError:  # perhaps not hashable, so no placement
        check_placements(given, src.mesh.ndim, src.ndim)
        raise


# Bounded: what was not asked for lately is found again.
@lru_cache(maxsize=4096)
def _cached_route(src: TensorSpec, placements: tuple[Placement, ...], start: int) -> Route:
    del start  # in the key, as below
    return _build_route(src, check_placements(placements, src.mesh.ndim, src.ndim))


def _build_route(src: TensorSpec, placements: tuple[Placement, ...]) -> Route:
    target = src.with_placements(placements)
    found = _runner_of(src, target)
    return Route(target, placements == src.placements, found.run, found.start)


@lru_cache(maxsize=4096)
def _cached_runner(src: TensorSpec, dst: TensorSpec, start: int) -> StepRunner:
    # In the key because runners hold process groups, which end with their start.
    del start
    return _build_runner(src, dst)


def _build_runner(src: TensorSpec, dst: TensorSpec) -> StepRunner:
    meet(src.mesh)
    # The way is chosen by numbers; only what is then done depends on symbols.
    there, wanted = hinted(src), hinted(dst)
    order = memory_order(there.tensor_meta)
    # Making process groups communicates, and must work also while a graph is traced; what is computed of symbols is
    # part of the graph.
    with nullcontext() if there is not src else outside_modes():
        moved = [_made(src, steps, order) for steps in _together(shortest_path(there, wanted).steps)]
    found = moved[0] if len(moved) == 1 else _chain(moved)
    return found if order == tuple(range(src.ndim)) or not moved else _permuted(found, order)


def forget() -> None:
    """Let go of all runners, and so of their process groups."""
    _cached_route.cache_clear()
    _cached_runner.cache_clear()


def _together(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps, slices that follow each other in one list: they are one cut. New labels are no work of their own."""
    found: list[list[Step]] = []
    for step in [s for s in steps if s.kind != "relabel"] or steps:
        if found and step.kind == found[-1][-1].kind == "slice":
            found[-1].append(step)
        else:
            found.append([step])
    return found


def _made(spec: TensorSpec, steps: Sequence[Step], order: tuple[int, ...]) -> StepRunner:
    meta = TensorMeta.contiguous([spec.shape[d] for d in order], spec.dtype)
    source = TensorSpec(spec.mesh, _reordered(steps[0].source, order), meta)
    target = TensorSpec(spec.mesh, _reordered(steps[-1].target, order), meta)
    return step_runner(steps[0].kind, source, target, steps[0].mesh_dims)


def _reordered(placements: Sequence[Placement], order: tuple[int, ...]) -> tuple[Placement, ...]:
    return tuple(shard(order.index(p.dim)) if isinstance(p, Shard) else p for p in placements)


def _chain(runners: Sequence[StepRunner]) -> StepRunner:
    def run(local: Tensor) -> Tensor:
        for move in runners:
            local = move.run(local)
        return local

    last = max((i for i, move in enumerate(runners) if move.start is not None), default=None)
    return StepRunner(run) if last is None else StepRunner(run, _start_of_chain(runners, last))


def _start_of_chain(runners: Sequence[StepRunner], last: int) -> Start:
    """Run what comes before the last collective and leave only that one under way: no collective may be issued when a
    result is taken, for that is no order that ranks share.
    """
    before, begin, after = runners[:last], runners[last].start, runners[last + 1 :]
    assert begin is not None

    def start(local: Tensor) -> AsyncResult:
        for move in before:
            local = move.run(local)
        result = begin(local)
        for move in after:
            result.then(move.run)
        return result

    return start


def _permuted(found: StepRunner, order: tuple[int, ...]) -> StepRunner:
    """Move in the order of memory, so that a transposed tensor stays transposed without a copy."""
    run, begin = found.run, found.start
    inverse = tuple(order.index(d) for d in range(len(order)))
    start = None if begin is None else lambda local: begin(local.permute(order)).then(lambda t: t.permute(inverse))
    return StepRunner(lambda local: run(local.permute(order)).permute(inverse), start)
