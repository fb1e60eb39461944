"""Redistribution: take a tensor's steps to another layout on this rank's local tensor.

A pair of specs is prepared once: the groups, shapes, cuts and paddings of this rank are known before the first run. A
prepared redistribution never modifies its input, and its result owns its memory: a slice is a copy, so writing to one
never shows in the other. All of this works below autograd, on plain local tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache

from attrs import frozen
from torch import Tensor

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.meeting import meet
from shardwise.comm.packing import Run
from shardwise.comm.run_step import StepRunner
from shardwise.kernel.placements import Placement, Shard, check_placements, shard
from shardwise.kernel.spec import SymbolicSpec, TensorMeta, TensorSpec, hinted, in_numbers, memory_order
from shardwise.kernel.world import PerWorld
from shardwise.planning.path import Step, shortest_path
from shardwise.private_torch.tracing import outside_modes

__all__ = ["Route", "redistribute_local", "route", "runner"]

_log = logging.getLogger(__name__)


@frozen
class Route:
    """How a tensor gets from one layout to another: ``run`` its local tensor, or ``start`` what is communicated last.

    ``start`` is None when nothing is communicated; ``stays`` says that the placements are the same.
    """

    target: TensorSpec
    stays: bool
    run: Run
    start: Callable[[Tensor], AsyncResult] | None


def redistribute_local(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """The local tensor of this rank under ``dst``, from the one under ``src``; every rank must call this.

    ``local`` has the shape ``src.local_shape()`` and any strides; the result has ``dst.local_shape()`` and strides in
    the order of the global tensor's. When the placements are the same, ``local`` itself comes back. Raises what
    :func:`shardwise.planning.path.shortest_path` raises, before anything is communicated.
    """
    return local if src is dst else runner(src, dst)(local)


def runner(src: TensorSpec, dst: TensorSpec) -> Run:
    """The function that redistributes local tensors from ``src`` to ``dst``; see :func:`redistribute_local`.

    Every rank of the mesh must ask for it at the same point of the program: it may have to make a process group.
    """
    return _step_runner(src, dst).run


def route(src: TensorSpec, placements: Sequence[Placement]) -> Route:
    """How ``src`` gets to other placements of the same tensor, as a user writes them.

    Raises what :func:`check_placements` and :func:`shardwise.planning.path.shortest_path` raise.
    """
    wanted = tuple(placements)
    if isinstance(src, SymbolicSpec):
        return _build_route(src, wanted)
    try:
        return _cached_route.now()(src, wanted)
    except TypeError:  # perhaps not hashable, so not a placement
        check_placements(wanted, src.mesh.ndim, src.ndim)
        raise


def forget() -> None:
    """Let go of all prepared redistributions, and so of their process groups."""
    _routes.cache_clear()
    _runners.cache_clear()


def _build_route(src: TensorSpec, placements: tuple[Placement, ...]) -> Route:
    checked = check_placements(placements, src.mesh.ndim, src.ndim)
    target = src.with_placements(checked)
    steps = _step_runner(src, target)
    return Route(target, checked == src.placements, steps.run, steps.start)


def _step_runner(src: TensorSpec, dst: TensorSpec) -> StepRunner:
    if isinstance(src, SymbolicSpec):
        # A spec with symbols belongs to one graph, so it is not cached. In a graph nothing is started early.
        return StepRunner(lambda local: _run_symbolic(local, src, dst))
    return _cached_runner.now()(src, dst)


def _run_symbolic(local: Tensor, src: TensorSpec, dst: TensorSpec) -> Tensor:
    """Redistribute with symbols for sizes, or with numbers where torch cannot write a formula in symbols."""
    try:
        return _build_runner(src, dst).run(local)
    except Exception as error:  # noqa: BLE001  # whatever torch raises for a formula
        _log.info("%s is redistributed for its sizes alone: %s: %s", src, type(error).__name__, error)
        with outside_modes():
            src, dst = in_numbers(src), in_numbers(dst)
        return _cached_runner.now()(src, dst).run(local)


def _build_runner(src: TensorSpec, dst: TensorSpec) -> StepRunner:
    """Find the cheapest steps and prepare each of them; slices that follow each other are one cut."""
    meet(src.mesh)
    # The path is chosen by numbers; only what is then done depends on symbols.
    start, goal = hinted(src), hinted(dst)
    order = memory_order(start.tensor_meta)
    path = shortest_path(start, goal).steps
    joined: list[list[Step]] = []
    # Other names on mesh dims of one rank need no work of their own beside other steps.
    for step in [s for s in path if s.kind != "relabel"] or path:
        if joined and step.kind == joined[-1][-1].kind == "slice":
            joined[-1].append(step)
        else:
            joined.append([step])

    def with_dims_in_memory_order(placements: Sequence[Placement]) -> TensorSpec:
        meta = TensorMeta.contiguous([src.shape[d] for d in order], src.dtype)
        moved = (shard(order.index(p.dim)) if isinstance(p, Shard) else p for p in placements)
        return TensorSpec(src.mesh, tuple(moved), meta)

    # Making process groups communicates, and must work also while a graph is traced; what is computed of symbols is
    # part of the graph.
    with nullcontext() if start is not src else outside_modes():
        runners = [
            StepRunner.of(
                steps[0].kind,
                with_dims_in_memory_order(steps[0].source),
                with_dims_in_memory_order(steps[-1].target),
                steps[0].mesh_dims,
            )
            for steps in joined
        ]
    whole = runners[0] if len(runners) == 1 else _chain(runners)
    if not runners or order == tuple(range(src.ndim)):
        return whole
    # Run in the order of memory, so that a transposed tensor stays transposed without a copy.
    run, begin = whole.run, whole.start
    inverse = tuple(order.index(d) for d in range(len(order)))
    return StepRunner(
        lambda local: run(local.permute(order)).permute(inverse),
        None if begin is None else lambda local: begin(local.permute(order)).then(lambda t: t.permute(inverse)),
    )


def _chain(runners: Sequence[StepRunner]) -> StepRunner:
    """One runner of several; only the last collective is started early.

    No collective may be issued when a result is waited for: ranks wait in an order of their own.
    """

    def run(local: Tensor) -> Tensor:
        for step in runners:
            local = step.run(local)
        return local

    last = max((i for i, step in enumerate(runners) if step.start is not None), default=None)
    if last is None:
        return StepRunner(run)
    before, begin, after = runners[:last], runners[last].start, runners[last + 1 :]
    assert begin is not None

    def start(local: Tensor) -> AsyncResult:
        for step in before:
            local = step.run(local)
        result = begin(local)
        for step in after:
            result.then(step.run)
        return result

    return StepRunner(run, start)


# Per world, because they hold process groups. Bounded: what was not asked for lately is prepared again.
_routes, _runners = lru_cache(maxsize=4096)(_build_route), lru_cache(maxsize=4096)(_build_runner)
_cached_route, _cached_runner = PerWorld(_routes, _routes.cache_clear), PerWorld(_runners, _runners.cache_clear)
