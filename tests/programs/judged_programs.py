"""Programs that are judged line by line: what a policy forbids is not sent, and what it lets pass sends nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import frozen

import shardwise as sw
from shardwise.comm.events import observe
from shardwise.errors import CommunicationError, NoRuleError, NoStrategyError, PlainTensorError
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.testing import mesh
from shardwise.testing.programs.machine import decided_by_chance
from shardwise.testing.programs.program import Call, Line, Program, op_called, operands_of
from shardwise.testing.programs.replay import _Replay

__all__ = ["Judged", "run_judged"]

REFUSALS = (NoRuleError, NoStrategyError, PlainTensorError)


@frozen
class Judged:
    """A call on one rank: whether it was forbidden, what it sent while it was, and what it sends where it may."""

    line: str
    forbidden: bool
    unknown: bool
    sent_under_policy: tuple[str, ...]
    sends: tuple[str, ...]
    error: str = ""


def run_judged(program: Program) -> tuple[list[Judged], bool]:
    """Run a program on this rank, each call under "forbid" first; and whether its values are those of a plain run."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        judged, values = _run(program, forbid=True)
        _, expected = _run(program, forbid=False)
    return judged, values.keys() == expected.keys() and all(
        _same(values[name], expected[name], how) for name, how in _how_equal(program, values).items()
    )


# Kernels of LAPACK round by how their memory is aligned, on one device too.
LAPACK = ("linalg", "lstsq", "cholesky", "qr", "lu_", "svd", "eig", "ormqr", "triangular_solve", "inverse", "ldl")


def _how_equal(program: Program, names: Iterable[int]) -> dict[int, str]:
    """By value: "exactly", "nearly" where LAPACK has a part in it, "not" where chance has."""
    how = dict.fromkeys(names, "exactly")
    for line in program.lines:
        own = [how.get(name, "exactly") for name in operands_of(line)]
        if isinstance(line, Call):
            own += ["not"] * decided_by_chance(op_called(line.op))
            own += ["nearly"] * any(word in line.op for word in LAPACK)
        worst = max(own, key=["exactly", "nearly", "not"].index, default="exactly")
        if worst != "exactly":
            # What a call writes is among its operands.
            changed = [*getattr(line, "names", (getattr(line, "name", None),)), *operands_of(line)]
            how.update((name, worst) for name in changed if name in how)
    return how


def _same(value: Any, other: Any, how: str) -> bool:
    if isinstance(value, MeshTensor):
        if value.spec.placements != other.spec.placements:
            return False
        value, other = value.to_local(), other.to_local()
    if how == "not" or not isinstance(value, torch.Tensor):
        return True
    within = {"rtol": 1e-4, "atol": 1e-6} if how == "nearly" else {"rtol": 0, "atol": 0}
    return torch.allclose(value, other, equal_nan=True, **within)


def _run(program: Program, *, forbid: bool) -> tuple[list[Judged], dict]:
    run = _Replay(program, mesh(program.mesh_shape))
    judged = []
    for line in program.lines:
        if not all(name in run.values for name in operands_of(line)):
            continue
        try:
            if forbid and isinstance(line, Call) and not decided_by_chance(op_called(line.op)):
                judged.append(_judged(run, line))
            else:
                run._run(line)
        except REFUSALS:
            continue
    return judged, run.values


def _judged(run: _Replay, line: Line) -> Judged:
    seen: list[str] = []
    error = None
    with observe(lambda event: seen.append(event.kind)):
        try:
            with sw.communication("forbid"):
                run._run(line)
        except CommunicationError as raised:
            error = raised
        under_policy: Sequence[str] = tuple(seen)
        seen.clear()
        if error is not None:
            run._run(line)
    unknown = error is not None and error.nbytes < 0
    return Judged(str(line), error is not None, unknown, under_policy, tuple(seen), str(error or ""))
