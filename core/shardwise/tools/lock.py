"""The lockfile of a program: a rehearsal of one step, as what a rank sends, module by module."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.kernel.whole_files import write_whole
from shardwise.program.decisions import Decisions
from shardwise.program.lock_file import MEMORY, PHASES, Lock, Row
from shardwise.program.step_plan import StepPlan
from shardwise.tools.rehearse import Rehearsal, refuse_empty, rehearse
from shardwise.tools.sites import Line, Site

__all__ = ["Locked", "is_ci", "lock_step", "locked", "save_lock"]


LEARNED = "learned"
"""What stands for the plan in the lockfile of a learned step."""


@frozen
class Locked:
    """What a lockfile holds, and the line of the program for each of its rows, which no file holds."""

    lock: Lock
    lines: Mapping[tuple[Any, ...], Line]

    def line_of(self, row: Row) -> str:
        """The line that sends what a row of this lock says; empty if it is not known."""
        line = self.lines.get(row.key, Line())
        return str(line) if line.number else ""


def lock_step(
    program: Callable[[DeviceMesh], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str] | None = None,
    *,
    name: str = "",
    device: str = "cpu",
    plan: StepPlan | Decisions | None = None,
    plan_name: str = "",
    tell: Callable[[str, int], None] | None = None,
) -> Locked:
    """Rehearse a step of ``program(mesh)`` and lock what its first rank sends and holds. A ``plan`` that is
    decisions alone is what the program has learned.

    Raises what :func:`shardwise.tools.rehearse.rehearse` raises, and :class:`CallError` if nothing ran.
    """
    with _no_collection():
        rehearsal = rehearse(program, mesh_shape, mesh_names, device=device, plan=plan, tell=tell, sites=True)
    refuse_empty(rehearsal)
    by = "" if plan is None else LEARNED
    if isinstance(plan, StepPlan):
        by = f"{plan_name} {plan.file.digest}".strip()
    return locked(rehearsal, name, by or plan_name, device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection meanwhile: when it runs depends on the process, and it ends what is alive."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def locked(rehearsal: Rehearsal, program: str = "", plan: str = "", device: str = "cpu") -> Locked:
    """The lock of a rehearsal that has sites."""
    times: dict[tuple[Any, ...], list[Site]] = {}
    for site in rehearsal.sites:
        times.setdefault(_row(site, 0, 0).key, []).append(site)
    rows = [_row(sites[0], len(sites), sum(site.nbytes for site in sites)) for sites in times.values()]
    memory = rehearsal.memory
    figures = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "kept": memory.kept,
        **{f"peak in {phase}": memory.peaks.get(phase, 0) for phase in PHASES},
    }
    lock = Lock(
        program=program,
        mesh_names=rehearsal.mesh_names,
        mesh_shape=rehearsal.mesh_shape,
        device=device,
        plan=plan,
        memory={name: figures[name] for name in MEMORY if figures[name]},
        rows=tuple(sorted(rows, key=lambda row: row.place)),
    )
    lines = {key: min((s.line for s in sites if s.line.number), default=Line()) for key, sites in times.items()}
    return Locked(lock, lines)


def _row(site: Site, times: int, nbytes: int) -> Row:
    return Row(site.phase, site.module, site.op, site.kind, site.mesh_dims, site.implicit, site.why, times, nbytes)


def save_lock(lock: Lock, path: Path) -> None:
    """Write a lockfile: whole, or not at all. Raises :class:`OSError`."""
    write_whole(path, lock.text())


def is_ci(environ: Mapping[str, str]) -> bool:
    """Whether the environment says that this is continuous integration, which compares and writes nothing."""
    return environ.get("CI", "").strip().lower() not in _OFF


_OFF = ("", "0", "false", "no", "off")
