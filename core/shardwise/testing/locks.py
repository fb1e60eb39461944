"""Lockfiles of communication in tests: a step sends what the file beside the test says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import CallError, LockFileError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.foreign_files import reason
from shardwise.program.lock_changes import difference_text, read_budget
from shardwise.program.lock_file import read_lock
from shardwise.steps.learned_step import learned_step
from shardwise.tools.lock import is_ci, lock_step, save_lock
from shardwise.tools.rehearse import dim_names

__all__ = ["CommunicationLock"]


@frozen
class CommunicationLock:
    """Compares steps with the lockfiles of one test; ``update`` writes them instead."""

    test_file: Path
    test: str
    update: bool = False
    _written: set[Path] = field(factory=set, init=False)

    def __call__(
        self,
        step: Callable[[DeviceMesh], Any],
        mesh: Mapping[str, int] | Sequence[int],
        *,
        name: str = "",
        budgets: Sequence[str] | str = (),
        learned: bool = False,
    ) -> None:
        """Fail unless a step sends and holds what its lockfile says, and keeps within the budgets.

        ``name`` tells several steps of a test apart. ``learned`` asks for a step after the first, by what that one has
        taught, whether or not a run would take it. Raises :class:`LockFileError` for a file that cannot be read, or
        that is for another mesh; where there is no file the test fails.
        """
        __tracebackhide__ = True
        if not callable(step):
            raise CallError(
                asked=f"compare the step {step!r} with a lockfile",
                found=f"it is {kind_of(step)}, and not a function",
                do="Give the function itself: communication_lock(step, mesh). It takes a mesh.",
            )
        names = tuple(mesh) if isinstance(mesh, Mapping) else None
        shape = tuple(mesh.values()) if isinstance(mesh, Mapping) else tuple(mesh)
        path = self.path(name)
        program = f"{self.test_file.name}::{self.test}{name and f' {name}'}"
        texts = [budgets] if isinstance(budgets, str) else budgets
        limits = [read_budget(text, dim_names(shape, names)) for text in texts]
        by = learned_step(step, shape, names).decisions if learned else None
        now = lock_step(step, shape, names, name=program, plan=by)
        excess = [line for limit in limits for line in limit.excess_text(now.lock)]
        if excess:
            pytest.fail("\n".join(excess))
        if self.update:
            if is_ci(os.environ):
                pytest.fail(f"{path.name} is not written: CI is set")
            if path in self._written and read_lock(path) != now.lock:
                pytest.fail(f"two steps of this test write {path.name}: give each a name=")
            if (other := _written_by_another(path, program)) is not None:
                pytest.fail(f"{path.name} is of {other}: give this test another name, or remove the file of that one")
            self._written.add(path)
            try:
                save_lock(now.lock, path)
            except OSError as error:
                pytest.fail(f"{path.name} cannot be written: {reason(error)}")
            return
        try:
            is_there = path.exists()
        except OSError as error:
            pytest.fail(f"{path.name} cannot be read: {reason(error)}")
        if not is_there:
            pytest.fail(f"there is no {path.name} beside the test: write it with `pytest --update-locks`")
        before = read_lock(path)
        lock = now.lock
        before.check_fits(f"compare a step with {path.name}", program, lock.mesh_names, lock.mesh_shape, lock.device)
        different = list(difference_text(before, now.lock, now.line_of))
        if different:
            do = "If this is as it should be, write it with `pytest --update-locks`."
            pytest.fail("\n".join([f"{path.name} does not hold.", *different, do]))

    def path(self, name: str = "") -> Path:
        """The lockfile of a step of this test."""
        words = [self.test_file.stem, self.test, *([name] if name else [])]
        return self.test_file.with_name(".".join(re.sub(r"[^\w-]+", "_", w).strip("_") for w in words) + ".lock")


def _written_by_another(path: Path, program: str) -> str | None:
    """What the lockfile is of, if not of this step: tests whose names differ by signs alone have one file."""
    try:
        other = read_lock(path).program
    except LockFileError:  # there is no such file, or it is to be replaced
        return None
    return None if other == program else other
