"""``shardwise lock``: what a step sends, written down, and compared with what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from attrs import asdict, evolve, field, frozen

from shardwise.cli.output import json_option, print_json, print_text, refuse_no_folder, refuse_to_overwrite
from shardwise.cli.program_errors import program_errors
from shardwise.cli.step_program import StepProgram, op_progress, step_options
from shardwise.errors import LockFileError, LockVersionError
from shardwise.kernel.plurals import counted
from shardwise.program.amounts import size_text
from shardwise.program.lock_changes import (
    OTHERWISE,
    Budget,
    Change,
    MemoryChange,
    changes,
    difference_text,
    memory_changes,
    read_budget,
    row_text,
)
from shardwise.program.lock_file import HEAD, Lock, Row, read_lock
from shardwise.program.lock_patterns import expanded
from shardwise.tools.lock import Locked, is_ci, lock_step, save_lock
from shardwise.tools.rehearse import dim_names
from shardwise.tools.sites import shown_path

__all__ = ["lock"]


@click.command()
@step_options
@click.option("--check", is_flag=True, help="Write nothing: exit with 1 and the differences, if there are any.")
@click.option(
    "--budget", "budgets", multiple=True, metavar="TEXT", help='"tp forward 10GiB": the most bytes. Repeatable.'
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("communication.lock"), show_default=True
)
@click.option(
    "--format", "form", type=click.Choice(["text", "github"]), default="text", show_default=True, help="How to print."
)
@json_option
def lock(
    *,
    step: StepProgram,
    check: bool,
    budgets: Sequence[str],
    out: Path,
    form: str,
    as_json: bool,
) -> None:
    """Write what a step sends to a lockfile, or compare: who sends what over which mesh dims, and why.

    FUNCTION takes the mesh, as for `shardwise rehearse`. One process follows the step without data, so no mesh is
    needed. Where the environment variable CI is set nothing is ever written: the command compares, as with --check.
    """
    refuse_no_folder("--out", out)
    in_folder = out.absolute()  # the program may go to another one
    if not check:
        refuse_to_overwrite("--out", out, HEAD.encode(), "a lockfile")
    in_ci = is_ci(os.environ)
    if in_ci and not check:
        click.echo("CI is set, so nothing is written: this compares, as with --check.", err=True)
    name = _program_name(step.text)
    asked = f"compare a step with {out}"
    # Before the step, which takes its time.
    names = dim_names(step.mesh_shape, step.mesh_names)
    limits = [read_budget(text, names) for text in budgets]
    before = _before(out, must_exist=check or in_ci)
    if before is not None and (check or in_ci):
        before.check_fits(asked, name, names, step.mesh_shape, step.device)
    with program_errors(step.text), op_progress(shown=not as_json) as tell:
        decisions, of_learning = step.decisions(tell)
        now = lock_step(
            step.run,
            step.mesh_shape,
            step.mesh_names,
            name=name,
            device=step.device,
            plan=step.plan if decisions is None else decisions,
            plan_name=step.plan_name,
            tell=tell,
        )
    exceeded = [limit for limit in limits if limit.used(now.lock) > limit.limit]
    outcome = Outcome(out, now, before, exceeded, compares=check or in_ci)
    if outcome.may_write:
        try:
            save_lock(now.lock, in_folder)
        except OSError as error:
            raise click.ClickException(f"cannot write {out}: {error.strerror}") from error
    if of_learning and not as_json:
        click.echo(of_learning, err=True)
    if as_json:
        print_json(outcome.as_json())
    else:
        lines = outcome.annotations() if form == "github" else outcome.lines()
        (click.echo if form == "github" else print_text)("\n".join(lines))
    if not outcome.is_good:
        raise SystemExit(1)


def _program_name(text: str) -> str:
    where, _, function = text.rpartition(":")
    return f"{shown_path(str(Path(where).resolve()))}:{function}" if where.endswith(".py") else text


def _before(path: Path, *, must_exist: bool) -> Lock | None:
    """The lockfile as it is; None where one is to be written and there is not one that can be read."""
    try:
        return read_lock(path)
    except LockFileError as error:
        # Not one of a later release in exchange for this one's.
        if must_exist or (isinstance(error, LockVersionError) and not error.is_earlier):
            raise
        return None


@frozen
class Outcome:
    """What a run of the command found."""

    path: Path
    now: Locked
    before: Lock | None
    exceeded: Sequence[Budget]
    compares: bool
    changes: Sequence[Change] = field(init=False)
    memory: Sequence[MemoryChange] = field(init=False)

    @changes.default
    def _changes(self) -> Sequence[Change]:
        return [] if self.before is None else changes(self.before, self.now.lock, self.now.line_of)

    @memory.default
    def _memory(self) -> Sequence[MemoryChange]:
        return [] if self.before is None else memory_changes(self.before, self.now.lock)

    @property
    def differs(self) -> bool:
        """Whether the lockfile says something else than the step does."""
        return self.before is not None and self.before.text() != self.now.lock.text()

    @property
    def may_write(self) -> bool:
        return not (self.compares or self.exceeded)

    @property
    def is_good(self) -> bool:
        return not self.exceeded and not (self.compares and self.differs)

    def lines(self) -> Iterator[str]:
        """For people."""
        lock = self.now.lock
        total = f"{counted(lock.times, 'collective')}, {size_text(lock.nbytes)} that a rank sends in"
        if not self.compares:
            yield f"{'wrote' if self.may_write else 'did not write'} {self.path}: {total}"
        elif not self.differs:
            yield f"{self.path} holds: {total}"
        else:
            yield f"{self.path} does not hold."
        if self.before is not None:
            yield from difference_text(self.before, lock, self.now.line_of)
        for budget in self.exceeded:
            yield from budget.excess_text(lock)
        if self.compares and self.differs:
            yield "If this is as it should be, write it with `shardwise lock` without --check."

    def annotations(self) -> Iterator[str]:
        """For GitHub: workflow commands, which it shows at the lines of a pull request."""
        for change in self.changes:
            level = "error" if change.kind in ("added", "grown") else "warning"
            yield _annotation(level, change.line or f"{self.path}:1", f"communication {change.kind}", str(change))
        for memory in self.memory:
            level = "error" if memory.kind == "grown" else "warning"
            yield _annotation(level, f"{self.path}:1", f"memory {memory.kind}", str(memory))
        for budget in self.exceeded:
            rows = budget.rows(self.now.lock)
            text = f"{size_text(budget.used(self.now.lock))}, most of it from {row_text(rows[0])}"
            where = self._line_of_pattern(rows[0]) or f"{self.path}:1"
            yield _annotation("error", where, f"over the budget {budget}", text)
        if self.compares and self.differs and not (self.changes or self.memory):
            yield _annotation("error", f"{self.path}:1", "communication", OTHERWISE)
        if self.is_good:
            total = counted(self.now.lock.times, "collective")
            yield f"::notice title=communication::{total}, as {self.path.name} says"

    def _line_of_pattern(self, pattern: Row) -> str:
        modules = set(expanded(pattern.module))
        rows = (row for row in self.now.lock.rows if row.module in modules)
        return next((self.now.line_of(r) for r in rows if evolve(r, module=pattern.module).key == pattern.key), "")

    def as_json(self) -> Mapping[str, Any]:
        """For programs."""
        lock = self.now.lock
        return {
            "file": str(self.path),
            "ok": self.is_good,
            "written": self.may_write,
            "program": lock.program,
            "mesh": list(lock.mesh_shape),
            "names": list(lock.mesh_names),
            "device": lock.device,
            "collectives": lock.times,
            "bytes": lock.nbytes,
            "memory": dict(lock.memory),
            "rows": [{**asdict(row), "line": self.now.line_of(row)} for row in lock.rows],
            "changes": [
                {
                    **asdict(change.row),
                    "change": change.kind,
                    "times_before": change.times,
                    "bytes_before": change.nbytes,
                    "line": change.line,
                }
                for change in self.changes
            ],
            "memory_changes": [asdict(change) for change in self.memory],
            "exceeded": [{**asdict(budget), "bytes": budget.used(lock)} for budget in self.exceeded],
        }


def _annotation(level: str, where: str, title: str, text: str) -> str:
    file, _, line = where.rpartition(":")
    return f"::{level} file={_property(file)},line={line},title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
