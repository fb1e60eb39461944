"""The judgement of one case: whether what the ranks hold after the call is what one device holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.engine.make_plan import is_joined
from shardwise.errors import ShardingError
from shardwise.kernel.reductions import reduce_pieces
from shardwise.kernel.spec import TensorSpec
from shardwise.testing.simulated import Coordinate
from shardwise.testing.trial import Answer, Case, Trial

__all__ = ["comparable", "difference", "judge"]

# Ops that hand out memory as it is: shape and dtype are all that can be judged.
_UNDEFINED = ("empty", "new_empty")

Locals = Mapping[Coordinate, Tensor | None]


def judge(
    trial: Trial,
    case: Case,
    before: Mapping[Coordinate, tuple[Tensor | None, ...]],
    answers: Mapping[Coordinate, Answer],
) -> str | None:
    """What is wrong with the ranks' answers, or ``None``. ``before`` holds the local operands before the call."""
    return (
        _judge_results(trial, case, answers)
        or _judge_others(trial, answers)
        or _judge_operands(trial, case, before, answers)
        or _judge_views(trial, case, answers)
    )


def _judge_results(trial: Trial, case: Case, answers: Mapping[Coordinate, Answer]) -> str | None:
    for at, answer in answers.items():
        if len(answer.tensors) != len(case.outputs):
            return f"rank {at} has {len(answer.tensors)} tensor results where the op has {len(case.outputs)}"
    values = not str(trial.op).split(".")[1].startswith(_UNDEFINED)
    for i, (spec, expected) in enumerate(zip(case.outputs, trial.expected.tensors, strict=True)):
        locals_ = {at: answer.tensors[i] for at, answer in answers.items()}
        wrong = difference(locals_, spec, expected, trial.tolerance, values=values)
        if wrong:
            return f"result {i}, {spec}: {wrong}"
    return None


def _judge_others(trial: Trial, answers: Mapping[Coordinate, Answer]) -> str | None:
    for at, answer in answers.items():
        if answer.others != trial.expected.others and str(answer.others) != str(trial.expected.others):
            return f"rank {at} answers {answer.others}, one device {trial.expected.others}"
    return None


def _judge_operands(
    trial: Trial,
    case: Case,
    before: Mapping[Coordinate, tuple[Tensor | None, ...]],
    answers: Mapping[Coordinate, Answer],
) -> str | None:
    for i, (name, spec) in enumerate(zip(trial.operand_names, case.inputs, strict=True)):
        locals_ = {at: answer.operands[i] for at, answer in answers.items()}
        if i in trial.written:
            wrong = difference(locals_, spec, trial.expected.operands[i], trial.tolerance)
            if wrong:
                return f"the written operand {name}, {spec}, after the call: {wrong}"
            continue
        for at, tensor in locals_.items():
            if tensor is not None and not _same(tensor, before[at][i]):
                return f"rank {at} changed its operand {name}, which the op does not write"
    return None


def _same(tensor: Tensor, other: Tensor | None) -> bool:
    if other is None or tensor.shape != other.shape:
        return False
    tensor, other = comparable(tensor), comparable(other)
    return torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _judge_views(trial: Trial, case: Case, answers: Mapping[Coordinate, Answer]) -> str | None:
    """Where the whole result is a view of an operand, each local result must be one of the local operand."""
    described = [r for r in trial.signature.results if r.is_tensor]
    if len(described) != 1 or described[0].alias is None or described[0].written:
        return None
    source = trial.signature.starts(trial.values)[described[0].alias]
    if case.lowered and is_joined(case.inputs[source], case.outputs):
        return None
    for k, whole in enumerate(trial.expected.tensors):
        if not _share(whole, trial.expected.operands[source]):
            continue
        for at, answer in answers.items():
            if not _share(answer.tensors[k], answer.operands[source]):
                return f"rank {at} has a copy as result {k}, which must be a view of its operand"
    return None


def _share(tensor: Tensor | None, other: Tensor | None) -> bool:
    if tensor is None or other is None:
        return tensor is other
    if tensor.numel() == 0:
        return True
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# -- one tensor --------------------------------------------------------------------------------------------------


def difference(
    parts: Locals, spec: TensorSpec | None, expected: Tensor | None, tolerance: float, *, values: bool = True
) -> str | None:
    """How local tensors differ from the whole one that they should be under a spec, or ``None``.

    ``tolerance`` is relative to the largest value in play; integers and bools must be equal.
    ``spec`` is ``None`` for a result whose shape depends on data: then every rank must hold the whole one.
    """
    for at, local in parts.items():
        wrong = _wrong_form(at, local, spec, expected)
        if wrong:
            return wrong
    if expected is None or not values:
        return None
    locals_ = {at: local for at, local in parts.items() if local is not None}
    try:
        reduced, scale = _reduced(locals_, spec)
    except ShardingError as error:
        return str(error)
    summed = spec is not None and not {"sum", "avg"}.isdisjoint(spec.reductions.values())
    for at, tensor in reduced.items():
        wanted = _part(expected, spec, at)
        close = _close(tensor, wanted, tolerance, scale, either_non_finite=summed)
        if close is not None:
            return f"at rank {at} {_shown(close, tensor, wanted)}"
    return None


def _wrong_form(at: Coordinate, local: Tensor | None, spec: TensorSpec | None, expected: Tensor | None) -> str | None:
    if local is None or expected is None:
        return None if local is expected else f"rank {at} has {local}, one device {expected}"
    shape = tuple(expected.shape) if spec is None else spec.local_shape(at)
    if tuple(local.shape) != shape:
        return f"rank {at} has a local tensor of shape {tuple(local.shape)}, not {shape}"
    return None if local.dtype == expected.dtype else f"rank {at} has {local.dtype}, one device {expected.dtype}"


def _reduced(locals_: Mapping[Coordinate, Tensor], spec: TensorSpec | None) -> tuple[dict[Coordinate, Tensor], float]:
    """The local tensors with partial mesh dims reduced (their coordinate set to 0), and the largest value in play."""
    parts = dict(locals_)
    if spec is None or not spec.reductions:
        return parts, 1.0
    parts = {at: _wide(t) for at, t in parts.items()}
    # A sum of large parts has their rounding errors. A maximum or minimum has no rounding: a large tolerance would
    # accept any value.
    rounds = not {"max", "min"}.issuperset(spec.reductions.values())
    scale = max(1.0, *(_largest(t) for t in parts.values())) if rounds else 1.0
    for mesh_dim, kind in reversed(spec.reductions.items()):
        size = spec.mesh_shape[mesh_dim]
        heads = [at for at in parts if at[mesh_dim] == 0]
        parts = {
            at: reduce_pieces([parts[(*at[:mesh_dim], i, *at[mesh_dim + 1 :])] for i in range(size)], kind)
            for at in heads
        }
    return parts, scale


def comparable(tensor: Tensor) -> Tensor:
    """A float8 tensor in float32, which is exact: torch cannot compare float8. Other tensors are returned unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _largest(tensor: Tensor) -> float:
    if tensor.dtype == torch.bool or not tensor.numel():
        return 1.0
    return float(torch.nan_to_num(tensor.abs().double(), nan=0, posinf=0, neginf=0).max())


def _part(expected: Tensor, spec: TensorSpec | None, at: Coordinate) -> Tensor:
    if spec is None:
        return expected
    for dim, (size, start) in enumerate(zip(*spec.local_shape_and_offset(at), strict=True)):
        expected = expected.narrow(dim, start, size)
    return expected


def _close(actual: Tensor, wanted: Tensor, tolerance: float, scale: float, *, either_non_finite: bool) -> Tensor | None:
    """Where two tensors agree; ``None`` when they do everywhere. ``tolerance`` is relative to the largest value.

    ``either_non_finite`` accepts inf for nan and the reverse: where a whole value overflows, its pieces may cancel.
    """
    actual, wanted = comparable(actual), comparable(wanted)
    if actual.dtype == wanted.dtype and torch.equal(actual, wanted):
        return None
    exact = not (wanted.is_floating_point() or wanted.is_complex())
    wanted = wanted.to(actual.dtype)
    reach = 0.0 if exact else tolerance * max(scale, _largest(wanted))
    close = torch.isclose(actual, wanted, rtol=0.0, atol=reach, equal_nan=True)
    if either_non_finite:
        close |= ~(actual.isfinite() | wanted.isfinite())
    return None if bool(close.all()) else close


def _shown(close: Tensor, actual: Tensor, wanted: Tensor) -> str:
    wrong: Sequence[Sequence[int]] = (~close).nonzero().tolist()
    first = tuple(wrong[0])
    return (
        f"{len(wrong)} of {close.numel()} elements differ; at {first} it has {actual[first].item():.6g} "
        f"where one device has {wanted[first].item():.6g}"
    )
