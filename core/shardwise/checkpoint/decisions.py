"""The decisions of a step in a checkpoint, so that a run that learned its program goes on by them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpoint.folder import DECISIONS, Checkpoint, contents_of
from shardwise.engine.decided import in_force
from shardwise.errors import CheckpointFileError, ShardingError
from shardwise.kernel.foreign_files import load_json, read_text, reason
from shardwise.program.decisions import Decisions
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_tensor, tag_by_name

__all__ = ["read_decisions", "resume", "write_decisions"]

_log = logging.getLogger(__name__)


def write_decisions(folder: Path) -> None:
    """Write the decisions that are in force into a checkpoint's folder, if there are some."""
    if in_force.decisions is None:
        return
    with (folder / DECISIONS).open("w", encoding="utf-8") as file:
        file.write(json.dumps(in_force.decisions.as_json(), indent=0, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_decisions(checkpoint: Checkpoint) -> Any:
    """What a checkpoint has as decisions, as plain data; None if it has none. Raises :class:`CheckpointFileError`."""
    if DECISIONS not in contents_of(checkpoint):
        return None
    path = checkpoint.path / DECISIONS
    try:
        data = load_json(read_text(path))
        Decisions.from_json(data)
    except (OSError, ValueError, ShardingError) as error:
        found = error.found if isinstance(error, ShardingError) else reason(error)
        raise CheckpointFileError(
            asked=f"load {checkpoint.path}",
            found=f"its {DECISIONS} cannot be read: {found}",
            do="Load it without sw.learn(), and learn the program again.",
            path=str(path),
            file=DECISIONS,
        ) from error
    return data


def resume(data: Any, modules: Iterable[nn.Module]) -> None:
    """Put decisions in force, if they are for the mesh of these modules. Every rank must call this."""
    if data is None or in_force.learner is None:
        return
    decisions = Decisions.from_json(data)
    named = [pair for m in modules for pair in (*m.named_parameters(), *m.named_buffers())]
    placed = [(name, tensor) for name, tensor in named if isinstance(tensor, MeshTensor)]
    meshes = {tuple(tensor.device_mesh.shape) for _, tensor in placed}
    if meshes != {decisions.mesh_shape}:
        shapes = ", ".join(map(str, sorted(meshes))) or "none"
        _log.warning(
            "the checkpoint's decisions are for a mesh of shape %s, and the modules lie on %s: the program is learned "
            "again",
            decisions.mesh_shape,
            shapes,
        )
        return
    in_force.learner(decisions)
    for name, tensor in placed:
        name_tensor(tensor, name)  # one that loading has put in place of another has none
        tag_by_name(tensor, decisions.depth)
