"""Redistribution: the steps of a path to another layout, run on this rank's local tensor.

A pair of specs is prepared once: the groups, shapes, cuts and paddings of this rank are computed before the first run.
A redistribution never modifies its input, and its result has its own memory: a slice is a copy, so a write to one is
not seen in the other. All of this works below autograd, on plain local tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

from torch import Tensor

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.meeting import meet
from shardwise.comm.packing import Run, copied
from shardwise.comm.run_step import StepRunner
from shardwise.kernel.local_strides import in_order
from shardwise.kernel.placements import Placement, Shard, check_placements, shard
from shardwise.kernel.spec import SymbolicSpec, TensorSpec, hinted, in_numbers
from shardwise.kernel.tensor_meta import TensorMeta, memory_order, unexpanded
from shardwise.kernel.world import PerWorld
from shardwise.planning.path import Leg, Step, legs, shortest_path
from shardwise.private_torch.modes import outside_modes

__all__ = ["route", "runner"]

_log = logging.getLogger(__name__)


def runner(src: TensorSpec, dst: TensorSpec) -> Run:
    """The function that takes the local tensor of this rank under ``src`` and returns the one under ``dst``.

    It takes a tensor of the shape ``src.local_shape()`` with any strides. The result has the shape
    ``dst.local_shape()`` and strides in the order of the global tensor's; it is the tensor itself when both specs are
    one. Every rank must call it, and must call ``runner`` at the same point of the program: that may make a process
    group. Raises what :func:`shardwise.planning.path.shortest_path` raises, before anything is communicated.
    """
    return _step_runner(src, dst).run


def route(src: TensorSpec, placements: Sequence[Placement]) -> tuple[TensorSpec, StepRunner | None]:
    """The redistribution of ``src`` to placements as a user writes them: ``Shard(-1)`` counts from the end.

    Returns the spec with these placements and what runs the steps, ``None`` where the placements stay the same. Raises
    what :func:`check_placements` and :func:`shardwise.planning.path.shortest_path` raise.
    """
    target = tuple(placements)
    if isinstance(src, SymbolicSpec):
        return _build_route(src, target)
    try:
        return _cached_route.now()(src, target)
    except TypeError:  # perhaps not hashable, so not a placement
        check_placements(target, src.mesh.ndim, src.ndim)
        raise


def forget() -> None:
    """Drop all prepared redistributions, and with them their process groups."""
    _routes.cache_clear()
    _runners.cache_clear()


def _build_route(src: TensorSpec, placements: tuple[Placement, ...]) -> tuple[TensorSpec, StepRunner | None]:
    checked = check_placements(placements, src.mesh.ndim, src.ndim)
    if checked == src.placements:
        # Nothing moves and the result shares memory, so a copy that may not be written stays one.
        return src, None
    target = src.with_placements(checked)
    if (meta := unexpanded(src.tensor_meta)) is not src.tensor_meta:
        target = TensorSpec(src.mesh, target.placements, meta)
    return target, _step_runner(src, target)


def _step_runner(src: TensorSpec, dst: TensorSpec) -> StepRunner:
    if not isinstance(src, SymbolicSpec):
        return _cached_runner.now()(src.untagged, dst.untagged)

    # A spec with symbols belongs to one graph, so it is not cached. In a graph nothing is started early.
    def run(local: Tensor) -> Tensor:
        try:
            return _build_runner(src, dst).run(local)
        except Exception as error:  # noqa: BLE001  # torch may raise anything where it cannot write a formula in symbols
            _log.info("%s is redistributed for its sizes alone: %s: %s", src, type(error).__name__, error)
            with outside_modes():
                ends = in_numbers(src), in_numbers(dst)
            return _cached_runner.now()(*ends).run(local)

    return StepRunner(run)


def _build_runner(src: TensorSpec, dst: TensorSpec) -> StepRunner:
    """Search the cheapest steps and prepare each of them. Slices that follow each other are one cut."""
    if src.is_strided or dst.is_strided:
        runners = [_in_factors(_build_runner(leg.src, leg.dst), leg) for leg in legs(src, dst)]
        shape = dst.local_shape()
        # A dim of one element gets its stride from the factors; torch tells memory formats by it.
        return _chain([*runners, StepRunner(lambda local: in_order(local.reshape(shape), dst.tensor_meta))])
    meet(src.mesh)
    # Numbers decide the path. Symbols are used only to run it.
    start, goal = hinted(src), hinted(dst)
    order = memory_order(start.tensor_meta)
    path = shortest_path(start, goal).steps
    joined: list[list[Step]] = []
    # A change of placements on mesh dims of one rank needs no work beside other steps.
    for step in [s for s in path if s.kind != "relabel"] or path:
        if joined and step.kind == joined[-1][-1].kind == "slice":
            joined[-1].append(step)
        else:
            joined.append([step])

    def with_dims_in_memory_order(placements: Sequence[Placement]) -> TensorSpec:
        meta = TensorMeta.contiguous([src.shape[d] for d in order], src.dtype)
        permuted = (shard(order.index(p.dim)) if isinstance(p, Shard) else p for p in placements)
        return TensorSpec(src.mesh, tuple(permuted), meta)

    # Making process groups communicates, also while a graph is traced. But what is computed from symbols is part of
    # the graph.
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
        whole.groups,
    )


def _in_factors(runner: StepRunner, leg: Leg) -> StepRunner:
    """A runner of the tensor whose dims are factors, for local tensors with the dims of either."""
    if leg.src is leg.dst:  # two ways to write one layout
        return StepRunner(copied)
    shape = leg.src.local_shape()
    run, begin = runner.run, runner.start
    return StepRunner(
        lambda local: run(local.reshape(shape)),
        None if begin is None else lambda local: begin(local.reshape(shape)),
        runner.groups,
    )


def _chain(runners: Sequence[StepRunner]) -> StepRunner:
    """One runner of several. Its ``start`` waits for every collective but the last.

    The wait for a result may not issue a collective, because ranks wait in different orders.
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

    return StepRunner(run, start, tuple(dict.fromkeys(group for step in runners for group in step.groups)))


# Per world, because they hold process groups. Bounded: a redistribution that was not used lately is prepared again.
_routes, _runners = lru_cache(maxsize=4096)(_build_route), lru_cache(maxsize=4096)(_build_runner)
_cached_route, _cached_runner = PerWorld(_routes, _routes.cache_clear), PerWorld(_runners, _runners.cache_clear)
