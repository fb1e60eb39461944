"""A directory of checkpoints: list them, complete a new one in one instant, remove old ones.

A checkpoint is written into a folder whose name starts with a dot. When all files are on the disk, a list of them with
sizes and checksums is added, and the folder gets its real name. From this instant the checkpoint exists. A checkpoint
is removed in the opposite order: first its name, then its files. So a folder with a real name is complete, whatever was
interrupted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from shardwise.errors import CheckpointFileError, CheckpointStepError
from shardwise.kernel.foreign_files import leads_out, load_json, read_text, reason, short

__all__ = [
    "DECISIONS",
    "METADATA",
    "Checkpoint",
    "Files",
    "begin",
    "check_files",
    "checkpoints_in",
    "commit",
    "contents_of",
    "damage",
    "find",
    "newest",
    "rules_of",
    "sums_of",
]

CONTENTS = "checkpoint.json"
"""The list of a checkpoint's files; written last."""

METADATA = ".metadata"
"""Torch's list of the tensors."""

DECISIONS = "decisions.json"
"""The decisions that were in force (:func:`shardwise.learn`), in a checkpoint of a run that had some."""

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


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """The checkpoints of a directory, the oldest first."""
    names = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(Checkpoint(int(name[1]), int(name[2] or 0), path) for path, name in names if name)


def newest(directory: Path) -> Checkpoint | None:
    """The last checkpoint of a directory whose files are all there.

    Raises :class:`CheckpointFileError` for one of another format: it is not damaged, so an earlier one must not be
    loaded in its place.
    """
    for checkpoint in reversed(checkpoints_in(directory)):
        _refuse_other_format(checkpoint)
        if not damage(checkpoint):
            return checkpoint
    return None


def find(directory: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step, or the last good one; a directory may also be one checkpoint itself.

    Raises :class:`CheckpointFileError` if there is not one.
    """
    if step is None and ((directory / METADATA).is_file() or (directory / CONTENTS).is_file()):
        name = _NAME.fullmatch(directory.name)
        there = [Checkpoint(int(name[1]), int(name[2] or 0), directory) if name else Checkpoint(None, 0, directory)]
        chosen: Checkpoint | None = there[0]
    else:
        there = checkpoints_in(directory)
        chosen = newest(directory) if step is None else next((c for c in reversed(there) if c.step == step), None)
    if chosen is not None:
        _refuse_other_format(chosen)
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


# -- one becomes complete ----------------------------------------------------------------------------------------


def begin(directory: Path, step: int) -> Path:
    """Make an empty folder for a checkpoint, and remove what interrupted runs left behind.

    Raises :class:`CheckpointStepError` for a step before the last checkpoint's, and for a negative one.
    """
    if step < 0:
        raise CheckpointStepError(
            asked=f"save step {step} in {directory}", found="steps count from 0", do="Give another step.", step=step
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(".step-*"):
        if path.suffix in (_PARTIAL, _REMOVED):
            _remove(path)
    last = newest(directory)
    if last is not None and last.step is not None and step < last.step:
        raise CheckpointStepError(
            asked=f"save step {step} in {directory}",
            found=f"there is a checkpoint of step {last.step}, and a run continues from the last step",
            do="Save into another directory, or remove the checkpoints of later steps.",
            step=step,
            last=last.step,
        )
    partial = directory / f".step-{step:08d}{_PARTIAL}"
    partial.mkdir()
    return partial


def commit(partial: Path, files: Files, step: int, keep: int, rules: Mapping[str, str] | None = None) -> Checkpoint:
    """Give a written folder its real name, and remove all but the last ``keep`` complete checkpoints.

    ``rules`` are those of the program, by plugin.
    """
    directory = partial.parent
    contents: dict[str, Any] = {"format": FORMAT, "step": step}
    if rules:
        contents["rules"] = dict(sorted(rules.items()))
    contents["files"] = {name: list(sums) for name, sums in sorted(files.items())}
    with (partial / CONTENTS).open("w") as file:
        file.write(json.dumps(contents, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    again = max((c.again + 1 for c in checkpoints_in(directory) if c.step == step), default=0)
    final = directory / (f"step-{step:08d}.{again}" if again else f"step-{step:08d}")
    partial.rename(final)
    _sync(directory)
    there = checkpoints_in(directory)
    good = [checkpoint for checkpoint in there if not damage(checkpoint)]
    by_step = {checkpoint.step: checkpoint for checkpoint in good}  # of one step the last
    last = sorted(by_step.values())[-max(keep, 1) :]
    for checkpoint in there:
        if checkpoint not in last and checkpoint < last[-1] and _other_format(checkpoint) is None:
            removed = checkpoint.path.with_name(f".{checkpoint.path.name}{_REMOVED}")
            checkpoint.path.rename(removed)
            _remove(removed)
    return Checkpoint(step, again, final)


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link that lies in its place: what a link leads to stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(directory: Path) -> None:
    """Write the names in a directory to the disk, where the system offers that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- checksums ---------------------------------------------------------------------------------------------------


def sums_of(folder: Path, pattern: str) -> Files:
    """Sizes and checksums of the files whose names match."""
    return {path.name: (path.stat().st_size, _crc(path)) for path in folder.glob(pattern)}


def contents_of(checkpoint: Checkpoint) -> Files:
    """The files that a checkpoint should have; empty for a folder that torch itself has written.

    Raises :class:`CheckpointFileError` for a list that cannot be read, or names files outside of the folder.
    """
    path = checkpoint.path / CONTENTS
    if checkpoint.step is None and not path.exists() and not path.is_symlink():
        return {}
    try:
        return _files_of(_contents(checkpoint)["files"], checkpoint.path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointFileError(
            asked=f"load {checkpoint.path}",
            found=f"its {CONTENTS} cannot be read ({reason(error)})",
            do="Load an earlier step (step=), and look at the disk.",
            path=str(path),
            file=CONTENTS,
        ) from error


def _files_of(table: Any, folder: Path) -> Files:
    if type(table) is not dict:
        raise ValueError(f"its files are a {type(table).__name__}")
    files = {}
    for name, sums in table.items():
        if leads_out(folder, name):
            raise ValueError(f"it names {short(name)!r}, which is outside of the folder")
        if type(sums) is not list or [type(n) for n in sums] != [int, int]:
            raise ValueError(f"{short(name)!r} has no size and checksum")
        files[name] = (sums[0], sums[1])
    return files


def rules_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The rules of the program that saved a checkpoint, by plugin; empty where nothing is known of them."""
    try:
        rules = _contents(checkpoint).get("rules")
    except (OSError, ValueError, AttributeError):
        return {}
    return {short(name): short(text) for name, text in rules.items()} if type(rules) is dict else {}


def _contents(checkpoint: Checkpoint) -> Any:
    if leads_out(checkpoint.path, CONTENTS):
        raise ValueError("it is a link to a file outside of the folder")
    return load_json(read_text(checkpoint.path / CONTENTS))


def _other_format(checkpoint: Checkpoint) -> Any:
    """The format of a checkpoint if it can be read and this version does not know it, else None."""
    try:
        number = _contents(checkpoint)["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if type(number) is int and number == FORMAT else number


def _refuse_other_format(checkpoint: Checkpoint) -> None:
    number = _other_format(checkpoint)
    if number is not None:
        raise CheckpointFileError(
            asked=f"read the checkpoint {checkpoint.path}",
            found=f"its {CONTENTS} has format {short(repr(number))}, and this version of shardwise reads format "
            f"{FORMAT}",
            do="Load it with the version that saved it, or a later one.",
            path=str(checkpoint.path),
            format=number,
        )


def damage(checkpoint: Checkpoint) -> str:
    """What is wrong with a checkpoint, as far as names and sizes tell; empty if nothing is."""
    try:
        files = contents_of(checkpoint)
    except CheckpointFileError as error:
        return str(error.found)
    for name, (size, _) in files.items():
        path = checkpoint.path / name
        try:
            there = path.stat().st_size if path.is_file() else None
        except OSError as error:  # a name that no file can have
            return f"{CONTENTS} names {short(name)}: {reason(error)}"
        if there is None:
            return f"{short(name)} is missing"
        if there != size:
            return f"{name} has {there} bytes instead of {size}"
    return ""


def check_files(checkpoint: Checkpoint, part: int, parts: int) -> None:
    """Read every ``parts``-th file and compare its checksum; raises :class:`CheckpointFileError`."""
    for name, (_, crc) in sorted(contents_of(checkpoint).items())[part::parts]:
        try:
            differs = _crc(checkpoint.path / name) != crc
        except OSError as error:
            raise CheckpointFileError(
                asked=f"load {checkpoint.path}",
                found=f"{name} cannot be read ({reason(error)})",
                do="Load an earlier step (step=), and look at the disk.",
                file=name,
            ) from error
        if differs:
            raise CheckpointFileError(
                asked=f"load {checkpoint.path}",
                found=f"{name} is not as it was saved: its checksum differs",
                do="Load an earlier step (step=), and look at the disk.",
                file=name,
            )


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
