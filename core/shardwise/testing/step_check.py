"""A training step on the ranks of a mesh against one device: which values differ, and which op made the first of them.

One device is a mesh of one rank, in a process of its own. The ranks are processes too, with the communication that a
program has. Both run the program from the same seed; random numbers are drawn by place, so that they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from attrs import evolve, frozen

from shardwise.testing.pool import WorkerPool
from shardwise.testing.step_differences import Difference
from shardwise.testing.step_values import ASKED, Asked, StepRun, run_step_on_rank

__all__ = ["ASKED", "STAGES", "StepReport", "check_step"]

STAGES = ("start", "inputs", "forward", "result", "gradients", "parameters", "buffers")
"""The stages of a step whose values are compared, in order."""

_WITHOUT_OPS = frozenset({"start", "inputs"})

Load = Callable[[str], Callable[..., Any]]


@frozen
class StepReport:
    """What was compared, and what differs: each difference with the ranks that have it, in the order of the step.

    ``op`` is the first op whose values differ in the stage of the first difference, ``None`` where none was found;
    ``more`` is then the first op that the ranks run and one device does not. ``small_gradients`` is not 0 where all
    gradients are below it, so that they may be rounding alone.
    ``error`` is what the program raised on the ranks after the first difference, if it did.
    """

    mesh_shape: tuple[int, ...]
    compared: dict[str, int]
    differences: tuple[tuple[Difference, tuple[int, ...]], ...] = ()
    op: tuple[Difference, tuple[int, ...]] | None = None
    error: str = ""
    more: Difference | None = None
    small_gradients: float = 0.0

    @property
    def is_same(self) -> bool:
        return not self.differences and not self.error

    @property
    def first(self) -> tuple[Difference, tuple[int, ...]] | None:
        """The first value that differs, and the ranks."""
        return self.differences[0] if self.differences else None


def check_step(  # noqa: PLR0913  # what the command has options for
    program: str,
    mesh_shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    load: Load,
    plan: str | None = None,
    rtol: float | None = None,
    double: bool = False,
    seed: int = 0,
    timeout: float = 300.0,
    tell: Callable[[str], None] = lambda _: None,
    pools: tuple[WorkerPool, WorkerPool] | None = None,
) -> StepReport:
    """Run a program on a mesh of local processes and on one device, and compare its step value by value.

    ``load(program)`` gives, in each process, the function that takes the mesh. It runs a step on it, or returns a loss,
    or ``(model, inputs)`` or ``(model, inputs, optimizer)``; without an optimizer the step is AdamW's. It must make the
    same global tensors on any mesh. ``rtol`` is relative to the largest value of a tensor; the default goes by its
    dtype. With ``double`` torch makes tensors in double precision, where rounding hides nothing. By ``plan`` the ranks
    run by the plan of a file. ``tell`` is called with what begins. ``pools`` are one of a single process and one of the
    mesh's; without them processes are started, and ended.

    Raises :class:`WorkerError` for what the program raises, and for ranks that do not answer in ``timeout`` seconds.
    """
    shape = tuple(mesh_shape)
    dims = tuple(names) if names else tuple(f"dim{i}" for i in range(len(shape)))
    with ExitStack() as stack:
        if pools is None:
            sizes = (1, math.prod(shape))
            alone, ranks = (stack.enter_context(WorkerPool(n, start_method="forkserver")) for n in sizes)
        else:
            alone, ranks = pools

        def run(stage: str, asked: Asked) -> list[StepRun]:
            with TemporaryDirectory(prefix="shardwise-check-") as folder:
                tell(f"{stage}, one device")
                one = evolve(asked, folder=folder, writes=True, mesh_shape=(1,) * len(shape), plan=None)
                alone.run(run_step_on_rank, load, program, one, timeout=timeout)
                tell(f"{stage}, {math.prod(shape)} ranks")
                runs: list[StepRun] = ranks.run(
                    run_step_on_rank, load, program, evolve(asked, folder=folder), timeout=timeout
                )
                return runs

        asked = Asked(shape, dims, seed, "", writes=False, plan=plan, rtol=rtol, double=double)
        runs = run("the step", asked)
        report = StepReport(
            shape,
            dict(runs[0].compared),
            _merged(runs),
            error=next((r.error for r in runs if r.error), ""),
            small_gradients=runs[0].small_gradients,
        )
        if report.first is None or report.first[0].place.stage in _WITHOUT_OPS:
            return report
        runs = run("ops", evolve(asked, ops=report.first[0].place))
        found = _merged(runs)
        return evolve(report, op=found[0] if found else None, more=next((r.more for r in runs if r.more), None))


def _merged(runs: Sequence[StepRun]) -> tuple[tuple[Difference, tuple[int, ...]], ...]:
    """The differences of all ranks in the order of the step, each place once, with the worst figures."""
    by_place: dict[Any, list[tuple[int, Difference]]] = {}
    for rank, one in enumerate(runs):
        for difference in one.differences:
            by_place.setdefault(difference.place, []).append((rank, difference))
    merged = []
    for entries in by_place.values():
        worst = max((difference for _, difference in entries), key=lambda d: d.worst)
        merged.append((worst, tuple(sorted({rank for rank, _ in entries}))))
    merged.sort(key=lambda one: one[0].position)
    return tuple(merged)
