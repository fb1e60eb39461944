"""Programs that are judged line by line: what a policy forbids is not sent, and what it lets pass sends nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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
    by_chance = any(isinstance(line, Call) and decided_by_chance(op_called(line.op)) for line in program.lines)
    return judged, by_chance or _same(values, expected)


def _same(values: dict, expected: dict) -> bool:
    if values.keys() != expected.keys():
        return False
    for name, value in values.items():
        other = expected[name]
        if isinstance(value, MeshTensor):
            if value.spec.placements != other.spec.placements:
                return False
            value, other = value.to_local(), other.to_local()  # noqa: PLW2901
        # Some kernels of LAPACK round by how their memory is aligned.
        if isinstance(value, torch.Tensor) and not torch.allclose(value, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return True


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
