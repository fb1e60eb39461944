"""A directory of checkpoints: which are there, how one becomes complete in one instant, which are removed.

A checkpoint is written into a folder whose name starts with a dot. When all its files are there and on the disk, a
list of them with sizes and checksums is added and the folder gets its real name: that is the instant from which it
exists. Folders are removed the other way round, the name first. So whatever is interrupted when, a folder with a real
name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from shardwise.errors import CheckpointFileError, CheckpointStepError

__all__ = ["Checkpoint", "Files", "begin", "check_files", "commit", "damage", "find", "found", "newest", "sums_of"]

CONTENTS = "checkpoint.json"
"""The list of a checkpoint's files; written last."""

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTIAL, _REMOVED = ".partial", ".removed"
_BLOCK = 1 << 22  # bytes read at a time for a checksum

Files = dict[str, tuple[int, int]]
"""File name -> bytes and CRC-32."""


@frozen(order=True)
class Checkpoint:
    """A complete checkpoint: its step, how often that step was saved again, and its folder.

    ``step`` is None for a folder that ``torch.distributed.checkpoint`` itself has written.
    """

    step: int | None
    again: int
    path: Path


def found(directory: Path) -> list[Checkpoint]:
    """The checkpoints of a directory, the oldest first."""
    names = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(Checkpoint(int(name[1]), int(name[2] or 0), path) for path, name in names if name)


def newest(directory: Path) -> Checkpoint | None:
    """The last checkpoint of a directory whose files are all there."""
    return next((checkpoint for checkpoint in reversed(found(directory)) if not damage(checkpoint)), None)


def find(directory: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the last good one; a directory may also be one checkpoint itself.

    Raises :class:`CheckpointFileError` where there is none.
    """
    if step is None and _is_checkpoint(directory):
        name = _NAME.fullmatch(directory.name)
        return Checkpoint(int(name[1]), int(name[2] or 0), directory) if name else Checkpoint(None, 0, directory)
    there = found(directory)
    chosen = newest(directory) if step is None else next((c for c in reversed(there) if c.step == step), None)
    wrong = damage(chosen) if chosen else "; ".join(f"{c.path.name}: {damage(c)}" for c in there if damage(c))
    if chosen is None or wrong:
        steps = ", ".join(str(c.step) for c in there) or "none"
        raise CheckpointFileError(
            asked=f"load {'the last checkpoint' if step is None else f'the checkpoint of step {step}'} of {directory}",
            found=wrong or f"the steps that are there: {steps}",
            do="Name another directory, or another step." if there else "Save one there first, or correct the path.",
            directory=str(directory),
            step=step,
        )
    return chosen


def _is_checkpoint(directory: Path) -> bool:
    return (directory / ".metadata").is_file() or (directory / CONTENTS).is_file()


# -- one becomes complete ----------------------------------------------------------------------------------------


def begin(directory: Path, step: int) -> Path:
    """A fresh folder to write a checkpoint into; what interrupted runs left behind is removed.

    Raises :class:`CheckpointStepError` for a step before the last one that is there, and for a negative one.
    """
    if step < 0:
        raise CheckpointStepError(
            asked=f"save step {step} in {directory}", found="steps count from 0", do="Give another step.", step=step
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(".step-*"):
        if path.suffix in (_PARTIAL, _REMOVED):
            shutil.rmtree(path)
    last = newest(directory)
    if last is not None and last.step is not None and step < last.step:
        raise CheckpointStepError(
            asked=f"save step {step} in {directory}",
            found=f"step {last.step} is there, and the last step is the one that a run goes on from",
            do="Save into another directory, or remove the checkpoints of later steps.",
            step=step,
            last=last.step,
        )
    partial = directory / f".step-{step:08d}{_PARTIAL}"
    partial.mkdir()
    return partial


def commit(partial: Path, files: Files, step: int, keep: int) -> Checkpoint:
    """Make a written folder a checkpoint, and keep only the last ``keep`` good ones."""
    directory = partial.parent
    contents = {"format": FORMAT, "step": step, "files": {name: list(sums) for name, sums in sorted(files.items())}}
    _write(partial / CONTENTS, json.dumps(contents, indent=1) + "\n")
    _sync(partial)
    again = max((c.again + 1 for c in found(directory) if c.step == step), default=0)
    final = directory / (f"step-{step:08d}.{again}" if again else f"step-{step:08d}")
    partial.rename(final)
    _sync(directory)
    _prune(directory, keep)
    return Checkpoint(step, again, final)


def _prune(directory: Path, keep: int) -> None:
    there = found(directory)
    good = [checkpoint for checkpoint in there if not damage(checkpoint)]
    kept = {checkpoint.step: checkpoint for checkpoint in good}  # of one step the last
    last = sorted(kept.values())[-max(keep, 1) :]
    for checkpoint in there:
        if checkpoint not in last and checkpoint < last[-1]:
            removed = checkpoint.path.with_name(f".{checkpoint.path.name}{_REMOVED}")
            checkpoint.path.rename(removed)
            shutil.rmtree(removed)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Have the names in a directory on the disk, where the system can say so."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- are its files what they were --------------------------------------------------------------------------------


def sums_of(folder: Path, pattern: str) -> Files:
    """Sizes and checksums of the files whose names match."""
    return {path.name: (path.stat().st_size, _crc(path)) for path in folder.glob(pattern)}


def contents_of(checkpoint: Checkpoint) -> Files:
    """The files that a checkpoint should have; none are known of a folder that torch itself has written."""
    path = checkpoint.path / CONTENTS
    if checkpoint.step is None and not path.exists():
        return {}
    files: Mapping[str, tuple[int, int]] = json.loads(path.read_text())["files"]
    return {name: (size, crc) for name, (size, crc) in files.items()}


def damage(checkpoint: Checkpoint) -> str:
    """What is seen to be wrong without reading the files; empty for nothing."""
    try:
        files = contents_of(checkpoint)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {CONTENTS} cannot be read ({type(error).__name__}: {error})"
    for name, (size, _) in files.items():
        path = checkpoint.path / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return ""


def check_files(checkpoint: Checkpoint, part: int, parts: int) -> None:
    """Read every ``parts``-th file and compare its checksum; raises :class:`CheckpointFileError`."""
    for name, (_, crc) in sorted(contents_of(checkpoint).items())[part::parts]:
        if _crc(checkpoint.path / name) != crc:
            raise CheckpointFileError(
                asked=f"load {checkpoint.path}",
                found=f"{name} is not what was saved: its checksum differs",
                do="Load an earlier step (step=), and look at the disk.",
                file=name,
            )


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
