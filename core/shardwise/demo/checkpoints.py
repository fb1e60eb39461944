"""The demo's checkpoints: what is saved of a run, and from where a run continues."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen
from torch import nn
from torch.optim import Optimizer

from shardwise import checkpoint
from shardwise.checkpoint.folder import newest
from shardwise.demo.data import Batches
from shardwise.demo.settings import RunSettings
from shardwise.demo.training import Step
from shardwise.errors import CheckpointError, CheckpointFileError
from shardwise.kernel.foreign_files import load_json, read_text, reason
from shardwise.kernel.whole_files import write_whole

__all__ = ["Checkpoints", "after_a_failure", "check_run"]

RUN = "run.json"
"""In the directory of the checkpoints: the settings that a run must keep when it continues."""

FREE = ("mesh", "device", "steps", "learn")
"""Settings that may change when a run continues."""


class Random:
    """The random state of the program, the same on every rank: every generator belongs here."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


@frozen
class Checkpoints:
    """Where a run is saved, and after how many steps each time."""

    directory: Path
    every: int

    def resume(self, model: nn.Module, optimizer: Optimizer, data: Batches) -> list[Step]:
        """Load the last checkpoint, and return the steps until then; empty without a checkpoint."""
        if checkpoint.latest(self.directory) is None:
            return []
        state = self._state(model, optimizer, data, [])
        checkpoint.load(state, self.directory)
        return [Step(int(number), *figures) for number, *figures in state["steps"]]

    def after(self, steps: list[Step], last: int, model: nn.Module, optimizer: Optimizer, data: Batches) -> None:
        """Save after a step if it is time to, or if it is the last step."""
        number = steps[-1].number
        if number % self.every == 0 or number == last:
            checkpoint.save(self._state(model, optimizer, data, steps), self.directory, step=number)

    def _state(self, model: nn.Module, optimizer: Optimizer, data: Batches, steps: list[Step]) -> dict[str, Any]:
        history = [[step.number, step.loss, step.norm, 0.0] for step in steps]
        return {"model": model, "optimizer": optimizer, "data": data, "random": Random(), "steps": history}


def check_run(directory: Path, settings: RunSettings) -> None:
    """Write the settings of a new run, or compare them with those of the existing run.

    Raises :class:`CheckpointError` for a run that cannot go on with these settings.
    """
    # As JSON gives them back: a tuple is a list.
    mine = json.loads(json.dumps({name: v for name, v in asdict(settings).items() if name not in FREE}))
    path = directory / RUN
    try:
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(mine, indent=1) + "\n")
            return
    except OSError as error:
        raise CheckpointFileError(
            asked=f"start a run in {directory}",
            found=f"its {RUN} cannot be written: {reason(error)}",
            do="Give a --checkpoint-dir that can be written and has room.",
            path=str(path),
            file=RUN,
        ) from error
    try:
        theirs = dict(load_json(read_text(path)))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointFileError(
            asked=f"go on with the run of {directory}",
            found=f"its {RUN} cannot be read ({reason(error)})",
            do="Restore it, or give another --checkpoint-dir.",
            path=str(path),
            file=RUN,
        ) from error
    unlike = [f"--{name.replace('_', '-')} {theirs.get(name)}" for name in mine if mine[name] != theirs.get(name)]
    if unlike:
        raise CheckpointError(
            asked=f"go on with the run of {directory}",
            found=f"it was started with {', '.join(unlike)}",
            do="Give the same options (only --mesh, --device and --steps may differ), or another --checkpoint-dir.",
        )
    last = newest(directory)
    if last is not None and last.step is not None and last.step > settings.steps:
        raise CheckpointError(
            asked=f"run to --steps {settings.steps}",
            found=f"the checkpoint in {directory} is of step {last.step}",
            do="Give more steps, or another --checkpoint-dir.",
        )


def after_a_failure(directory: Path) -> str:
    """What to print after a run that has ended early."""
    last = newest(directory)
    if last is None:
        return f"No checkpoint was complete in {directory}{os.sep}: the same command starts from the beginning."
    return f"The same command goes on from step {last.step}: its checkpoint is {last.path}."
