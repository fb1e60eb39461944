"""The plan of a step: the content of its file, and its decisions, which lie in a second file beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from shardwise.errors import PlanFileError, PlanMeshError, ShardingError
from shardwise.kernel import foreign_files
from shardwise.kernel.foreign_files import load_json, reason, short
from shardwise.kernel.whole_files import write_together
from shardwise.program.decisions import Decisions
from shardwise.program.plan_file import PlanFile, parse
from shardwise.program.step_graph import Places

__all__ = ["StepPlan", "decisions_path", "read_plan", "read_text"]


def decisions_path(path: Path) -> Path:
    """The file of decisions beside a plan file."""
    return path.with_name(f"{path.name}.decisions.json")


@frozen(eq=False)
class StepPlan:
    """What the file says, and the decisions by tag that a run takes."""

    file: PlanFile
    decisions: Decisions

    def placements_of(self, name: str) -> Places | None:
        """Where a parameter or buffer lies; None if the plan does not have it."""
        known = self.file.placements_of(name)
        return None if known is None else known[1]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, and its decisions beside it as ``<path>.decisions.json``."""
        target = Path(path)
        data = {"plan": self.file.digest, **self.decisions.as_json()}
        decisions = json.dumps(data, indent=0, sort_keys=True) + "\n"
        try:
            # Together: a plan is not read with the decisions of another.
            write_together({decisions_path(target): decisions, target: self.file.text()})
        except OSError as error:
            raise PlanFileError(
                asked=f"write the plan {target}",
                found=f"{target} cannot be written ({reason(error)})",
                do="Name a file in a folder that can be written and has room.",
                path=str(target),
            ) from error

    def check_mesh(self, asked: str, mesh_shape: Sequence[int], mesh_names: Sequence[str] | None) -> None:
        """Raise :class:`PlanMeshError` unless a mesh has the shape and the names of the plan's."""
        names = tuple(mesh_names) if mesh_names else tuple(f"dim{i}" for i in range(len(mesh_shape)))
        if (tuple(mesh_shape), names) != (self.file.mesh_shape, self.file.mesh_names):
            given = ", ".join(f"{name} {n}" for name, n in zip(names, mesh_shape, strict=True))
            raise PlanMeshError(
                asked=asked,
                found=f"the plan {self.file.source or self.file.program} is for a mesh of {self.file.mesh_text}, and "
                f"this mesh has {given}",
                do="Plan the program for this mesh.",
                path=self.file.source,
                mesh=given,
            )


def read_plan(path: str | os.PathLike[str]) -> StepPlan:
    """The plan in a file and the decisions beside it.

    Raises :class:`PlanFileError` or :class:`PlanVersionError`, with the file and the line; nothing is read in part.
    """
    target = Path(path)
    file = parse(read_text(target, "the plan"), str(target))
    beside = decisions_path(target)
    text = read_text(beside, f"the decisions of the plan {target}")
    asked = f"read the decisions of the plan {target}"
    try:
        data = load_json(text)
        of = data.pop("plan")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanFileError(
            asked=asked,
            found=f"{beside} is not a whole file of decisions ({reason(error)})",
            do="Plan the program again.",
            path=str(beside),
        ) from error
    if of != file.digest:
        raise PlanFileError(
            asked=asked,
            found=f"{beside} was made for a plan with the digest {short(of)}, and the plan has {file.digest}: one of "
            "the two files was changed or belongs to another plan",
            do="Restore both files of one plan, or plan the program again.",
            path=str(beside),
        )
    try:
        decisions = Decisions.from_json(data)
    except ShardingError as error:
        raise PlanFileError(asked=asked, found=f"{beside}: {error.found}", do=error.do, path=str(beside)) from error
    if decisions.mesh_shape != file.mesh_shape:
        raise PlanFileError(
            asked=asked,
            found=f"{beside} has decisions for the mesh {decisions.mesh_shape}, and the plan is for {file.mesh_text}",
            do="Plan the program again.",
            path=str(beside),
        )
    return StepPlan(file, decisions)


def read_text(path: Path, what: str) -> str:
    """The text of a file of a plan. Raises :class:`PlanFileError`."""
    try:
        return foreign_files.read_text(path)
    except (OSError, ValueError) as error:
        raise PlanFileError(
            asked=f"read {what}",
            found=f"{path} cannot be read ({reason(error)})",
            do="Name a file that `shardwise plan --out` wrote; its decisions lie beside it.",
            path=str(path),
        ) from error
