"""Decide for a recorded step: by arithmetic alone, and on one rank for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of
from shardwise.comm.link_agreement import from_first
from shardwise.errors import MemoryPlanError, NoPlanError
from shardwise.kernel.mesh import own_coordinate
from shardwise.kernel.plurals import counted
from shardwise.program.decisions import Decisions
from shardwise.program.step_graph import StepGraph
from shardwise.steps.memory_limit import MemoryLimit
from shardwise.steps.solving import solve_graph

__all__ = ["Learned", "decide_step", "decided_by_all", "has_ranks"]

_log = logging.getLogger(__name__)

_SILENT = 3.0
"""Seconds after which a person who waits for a step is told what it waits for."""


@frozen
class Learned:
    """What was decided: seconds of a step by the cost model before and after, and what it took.

    ``before`` is None where the choice op by op moves a tensor that no plan may. Decisions of a checkpoint
    have no seconds.
    """

    decisions: Decisions
    before: float | None
    after: float | None
    calls: int
    torn: int
    seconds: float

    def __str__(self) -> str:
        if self.after is None:
            return f"{counted(len(self.decisions), 'decision')} of a checkpoint"
        before = "" if self.before is None else f"{self.before * 1e3:.3f} ms a step before, "
        return (
            f"{self.calls} calls, {counted(len(self.decisions), 'decision')} in {self.seconds:.2f} s: "
            f"{before}{self.after * 1e3:.3f} ms after (by the cost model)"
        )


def decide_step(graph: StepGraph, limit: MemoryLimit | None = None, earlier: Decisions | None = None) -> Learned:
    """Decide for a recorded step. It is arithmetic alone: ranks with the same arguments decide the same.

    What ``earlier`` decisions say about its calls holds, unless there is a limit.
    """
    begin = time.perf_counter()
    with _told(len(graph.calls)):
        solved = solve_graph(graph, limit, earlier)
    if solved.torn:
        _log.info("%d keys have calls with different decisions; each takes the most frequent one", solved.torn)
    seconds = time.perf_counter() - begin
    before = solved.recorded_seconds
    return Learned(solved.decisions, before, solved.seconds, len(graph.calls), solved.torn, seconds)


@contextmanager
def _told(calls: int) -> Iterator[None]:
    """Say that the program is being decided on, if that takes a while."""
    timer = Timer(
        _SILENT,
        _log.warning,
        (
            (
                "this step waits until its %d calls are decided on together, once; later steps run by what was decided "
                "(SHARDWISE_LEARN=off decides call by call)"
            ),
            calls,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def decided_by_all(graph: StepGraph, limit: MemoryLimit | None, earlier: Decisions | None = None) -> Learned:
    """Decide on the first rank of the mesh, within its limit; every rank has its decisions.

    Or every rank raises :class:`NoPlanError`, or :class:`MemoryPlanError` where there is none within the limit.
    """
    if not has_ranks(graph.mesh):
        return decide_step(graph, limit, earlier)
    mesh: Any = graph.mesh
    told: dict[str, Any] = {}
    if not any(own_coordinate(mesh)):
        try:
            learned = decide_step(graph, limit, earlier)
            told = {
                "decisions": learned.decisions.as_json(),
                "figures": [learned.before, learned.after, learned.calls, learned.torn, learned.seconds],
            }
        except MemoryPlanError as error:
            told = {"too little memory": [error.asked, error.found, error.do, error.limit]}
        except Exception as error:  # noqa: BLE001  # the other ranks wait for this one: they must be told
            _log.info("the step could not be planned", exc_info=True)
            told = {"error": f"{type(error).__name__}: {error}"}
    told = from_first(mesh, told)
    if "too little memory" in told:
        asked, found, do, nbytes = told["too little memory"]
        raise MemoryPlanError(asked=asked, found=found, do=do, limit=nbytes)
    if "error" in told:
        raise NoPlanError(
            asked="decide for the whole step that was recorded",
            found=f"the first rank of the mesh failed: {told['error'].rstrip('.')}",
            do="Run without learn(), and report the program if it is not the rule of a plugin that fails.",
        )
    before, after, calls, torn, seconds = told["figures"]
    return Learned(Decisions.from_json(told["decisions"]), before, after, calls, torn, seconds)


def has_ranks(mesh: Any) -> bool:
    """Whether other ranks run a step on a mesh, too, and can be reached."""
    return isinstance(mesh, DeviceMesh) and mesh.size() > 1 and backend_of(mesh) != "fake"
