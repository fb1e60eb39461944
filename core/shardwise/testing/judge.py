"""Judge one case: compare what the ranks hold after the call with what one device holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardwise.engine.make_plan import is_joined
from shardwise.errors import ShardingError
from shardwise.kernel.reductions import reduce_pieces
from shardwise.kernel.spec import TensorSpec
from shardwise.testing.rounding import LEAST, Rounding, distance
from shardwise.testing.simulated import Coordinate
from shardwise.testing.trial import Answer, Case, Trial

__all__ = ["comparable", "difference", "judge"]

# Ops that return memory that nobody wrote. Only shape and dtype of their results can be judged.
_UNDEFINED = ("empty", "new_empty")

# Of zeros of both signs either is the largest.
_UNSIGNED = frozenset({"max", "min"})
# Ops whose second result is a running mean, which becomes NaN after an infinity, but not at its end: NaN or infinity,
# by the order in which a kernel reads.
_RUNNING_MEANS = ("var_mean", "std_mean")
_MEAN, _MEAN_OUT = 1, "out1"

Locals = Mapping[Coordinate, Tensor | None]


def judge(
    trial: Trial,
    case: Case,
    before: Mapping[Coordinate, tuple[Tensor | None, ...]],
    answers: Mapping[Coordinate, Answer],
    *,
    signs: bool = True,
) -> str | None:
    """What is wrong with the ranks' answers, or ``None``. ``before`` holds the local operands before the call.

    Without ``signs`` the sign of a zero does not matter.
    """
    # Where some operand is a partial sum with more than one zero, additions decide which zero a result has.
    piecewise = any(
        spec is not None
        and not {"sum", "avg"}.isdisjoint(spec.reductions.values())
        and any(bool((ts[i] != 0).any()) for ts in before.values() if ts[i] is not None)  # type: ignore[union-attr]
        for i, spec in enumerate(case.inputs)
    )
    # And of zeros of both signs either is the largest.
    extremes = any(spec is not None and not _UNSIGNED.isdisjoint(spec.reductions.values()) for spec in case.inputs)
    rounding = trial.rounding(case, before, piecewise=piecewise)
    # Pieces of both signs times infinity are NaN, and so are infinities of both signs in the parts of a sum. A factor
    # that is one number can be looked at; tensors are not.
    factors = sum(spec is not None and spec.ndim > 0 for spec in case.inputs) > 1
    adds = any(spec is not None and not {"sum", "avg"}.isdisjoint(spec.reductions.values()) for spec in case.outputs)
    compare = partial(
        difference,
        signs=signs and not (piecewise or extremes),
        infinities=not (factors and (piecewise or adds)),
    )
    return (
        _judge_results(trial, case, answers, rounding, compare)
        or _judge_operands(trial, case, before, answers, rounding, compare)
        or _judge_views(trial, case, answers)
    )


def _has_running_mean(trial: Trial) -> bool:
    return any(part in str(trial.op) for part in _RUNNING_MEANS)


def _judge_results(
    trial: Trial,
    case: Case,
    answers: Mapping[Coordinate, Answer],
    rounding: Rounding,
    compare: Callable[..., str | None],
) -> str | None:
    for at, answer in answers.items():
        if len(answer.tensors) != len(case.outputs):
            return f"rank {at} has {len(answer.tensors)} tensor results where the op has {len(case.outputs)}"
    values = not str(trial.op).split(".")[1].startswith(_UNDEFINED)
    for i, (spec, expected) in enumerate(zip(case.outputs, trial.expected.tensors, strict=True)):
        locals_ = {at: answer.tensors[i] for at, answer in answers.items()}
        within = partial(rounding.within, i)
        as_one = i == _MEAN and _has_running_mean(trial)
        wrong = compare(locals_, spec, expected, within, values=values, as_one=as_one)
        if wrong:
            return f"result {i}, {spec}: {wrong}"
    for at, answer in answers.items():
        if answer.others != trial.expected.others and str(answer.others) != str(trial.expected.others):
            return f"rank {at} answers {answer.others}, one device {trial.expected.others}"
    return None


def _judge_operands(
    trial: Trial,
    case: Case,
    before: Mapping[Coordinate, tuple[Tensor | None, ...]],
    answers: Mapping[Coordinate, Answer],
    rounding: Rounding,
    compare: Callable[..., str | None],
) -> str | None:
    results = len(trial.expected.tensors)
    for i, (name, spec) in enumerate(zip(trial.operand_names, case.inputs, strict=True)):
        locals_ = {at: answer.operands[i] for at, answer in answers.items()}
        if i in trial.written:
            within = partial(rounding.within, results + i)
            as_one = name == _MEAN_OUT and _has_running_mean(trial)
            wrong = compare(locals_, spec, trial.expected.operands[i], within, as_one=as_one)
            if wrong:
                return f"the written operand {name}, {spec}, after the call: {wrong}"
            continue
        for at, tensor in locals_.items():
            original = before[at][i]
            if tensor is None:
                continue
            same = original is not None and tensor.shape == original.shape
            if same and original is not None:
                now, then = comparable(tensor), comparable(original)
                same = torch.equal(now, then) or not bool(distance(now, then).any())
            if not same:
                return f"rank {at} changed its operand {name}, which the op does not write"
    return None


def _judge_views(trial: Trial, case: Case, answers: Mapping[Coordinate, Answer]) -> str | None:
    """If the whole result is a view of an operand, each local result must be a view of the local operand."""
    described = [r for r in trial.signature.results if r.is_tensor]
    if len(described) != 1 or described[0].alias is None or described[0].written:
        return None
    source = trial.signature.starts(trial.values)[described[0].alias]
    if case.lowered and is_joined(case.inputs[source], case.outputs):
        return None
    for k, whole in enumerate(trial.expected.tensors):
        if not _share_memory(whole, trial.expected.operands[source]):
            continue
        for at, answer in answers.items():
            if not _share_memory(answer.tensors[k], answer.operands[source]):
                return f"rank {at} has a copy as result {k}, which must be a view of its operand"
    return None


def _share_memory(tensor: Tensor | None, other: Tensor | None) -> bool:
    if tensor is None or other is None:
        return tensor is other
    if tensor.numel() == 0:
        return True
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# -- one tensor --------------------------------------------------------------------------------------------------


class Within(Protocol):
    """Which elements are near enough; see :meth:`shardwise.testing.rounding.Rounding.within`."""

    def __call__(self, apart: Tensor, size: Tensor, cut: Callable[[Tensor], Tensor], *, added: bool) -> Tensor: ...


def difference(
    parts: Locals,
    spec: TensorSpec | None,
    expected: Tensor | None,
    tolerance: float | Within,
    *,
    values: bool = True,
    signs: bool = True,
    infinities: bool = True,
    as_one: bool = False,
) -> str | None:
    """How local tensors differ from the parts of a whole tensor under a spec; ``None`` if they do not.

    ``tolerance`` says which differences are rounding, element by element (see :mod:`shardwise.testing.rounding`); a
    number is relative to the largest value in play. Integers and bools must be equal, infinities and NaN must be where
    they are on one device. Without ``signs`` the sign of a zero does not matter, and without ``infinities`` NaN is
    accepted for an infinity; ``as_one`` accepts each for the other. ``spec`` is ``None`` for a result whose shape
    depends on data: then every rank must hold the whole tensor. Without ``values`` only shapes and dtypes are compared.
    """
    for at, local in parts.items():
        wrong = _wrong_form(at, local, spec, expected)
        if wrong:
            return wrong
    if expected is None or not values:
        return None
    locals_ = {at: local for at, local in parts.items() if local is not None}
    try:
        reduced = _reduced(locals_, spec)
    except ShardingError as error:
        return str(error)
    # Products of complex numbers mix the zeros of their parts.
    unsigned = _UNSIGNED | {"product"} if expected.is_complex() else _UNSIGNED
    signs = signs and (spec is None or unsigned.isdisjoint(spec.reductions.values()))
    for at, (tensor, size) in reduced.items():
        wanted = _part(expected, spec, at)
        if torch.equal(comparable(tensor), comparable(wanted)) and not (signs and _loses_signs(tensor, wanted)):
            continue
        cut = partial(_part, spec=spec, at=at)
        close = _close(comparable(tensor), comparable(wanted), size, tolerance, cut, signs=signs)
        if not infinities and _is_inexact(wanted):
            close |= tensor.isnan() & wanted.isinf()
        if as_one and _is_inexact(wanted):
            close |= ~tensor.isfinite() & ~wanted.isfinite()
        if not bool(close.all()):
            return f"at rank {at} {_shown(close, tensor, wanted)}"
    return None


def _loses_signs(actual: Tensor, wanted: Tensor) -> bool:
    actual, wanted = comparable(actual), comparable(wanted)
    if wanted.is_complex():
        return _loses_signs(torch.view_as_real(actual.resolve_conj()), torch.view_as_real(wanted.resolve_conj()))
    return wanted.is_floating_point() and not torch.equal(actual.signbit(), wanted.signbit())


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wrong_form(at: Coordinate, local: Tensor | None, spec: TensorSpec | None, expected: Tensor | None) -> str | None:
    if local is None or expected is None:
        return None if local is expected else f"rank {at} has {local}, one device {expected}"
    shape = tuple(expected.shape) if spec is None else spec.local_shape(at)
    if tuple(local.shape) != shape:
        return f"rank {at} has a local tensor of shape {tuple(local.shape)}, not {shape}"
    return None if local.dtype == expected.dtype else f"rank {at} has {local.dtype}, one device {expected.dtype}"


def _reduced(locals_: Locals, spec: TensorSpec | None) -> dict[Coordinate, tuple[Tensor, Tensor | None]]:
    """The local tensors with partial mesh dims reduced (their coordinate set to 0), and the sums of the absolute values
    of the pieces where they are added.
    """
    parts = {at: t for at, t in locals_.items() if t is not None}
    if spec is None or not spec.reductions:
        return {at: (t, None) for at, t in parts.items()}
    parts = {at: (t.double() if t.is_floating_point() else t) for at, t in parts.items()}
    sizes = {at: t.abs().nan_to_num(0, 0, 0) for at, t in parts.items() if _is_inexact(t)}
    # A maximum or minimum has no rounding.
    rounds = not {"max", "min"}.issuperset(spec.reductions.values())
    for mesh_dim, kind in reversed(spec.reductions.items()):
        parts = _along(parts, mesh_dim, spec.mesh_shape[mesh_dim], kind)
        sizes = _along(sizes, mesh_dim, spec.mesh_shape[mesh_dim], "max" if kind == "min" else kind) if sizes else sizes
    return {at: (t, sizes.get(at) if rounds else None) for at, t in parts.items()}


def _along(parts: Mapping[Coordinate, Tensor], mesh_dim: int, size: int, kind: str) -> dict[Coordinate, Tensor]:
    heads = [at for at in parts if at[mesh_dim] == 0]
    return {
        at: reduce_pieces([parts[(*at[:mesh_dim], i, *at[mesh_dim + 1 :])] for i in range(size)], kind) for at in heads
    }


def comparable(tensor: Tensor) -> Tensor:
    """A float8 tensor in float32, which is exact: torch cannot compare float8. Other tensors are returned unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def _part(expected: Tensor, spec: TensorSpec | None, at: Coordinate) -> Tensor:
    """One rank's part of a whole tensor, partial or not. There may be dims behind those of the spec: the parts of
    complex numbers.
    """
    if spec is None:
        return expected
    if spec.is_strided:
        behind, inner = expected.shape[spec.ndim :], spec.unflattened(spec.factors)
        unflattened = expected.reshape((*inner.shape, *behind))
        return _part(unflattened, inner, at).reshape((*spec.local_shape(at), *behind))
    for dim, (size, start) in enumerate(zip(*spec.local_shape_and_offset(at), strict=True)):
        expected = expected.narrow(dim, start, size)
    return expected


def _close(
    actual: Tensor,
    wanted: Tensor,
    added: Tensor | None,
    tolerance: float | Within,
    cut: Callable[[Tensor], Tensor],
    *,
    signs: bool,
) -> Tensor:
    """Per element, whether two tensors agree. ``added`` is the sum of the absolute values of partial pieces."""
    if not _is_inexact(wanted):
        return actual == wanted.to(actual.dtype)
    apart = distance(actual, wanted)
    if not signs:
        apart = torch.where(apart == LEAST, 0.0, apart)
    size = wanted.abs().double().nan_to_num(0, 0, 0)
    if added is not None:
        size = size + added
    if wanted.is_complex():
        size = size.unsqueeze(-1)
    if isinstance(tolerance, float):
        close = apart <= tolerance * max(1.0, float(size.max()) if size.numel() else 1.0)
    else:
        close = tolerance(apart, size, cut, added=added is not None)
    return close.all(-1) if wanted.is_complex() else close


def _shown(close: Tensor, actual: Tensor, wanted: Tensor) -> str:
    wrong: Sequence[Sequence[int]] = (~close).nonzero().tolist()
    first = tuple(wrong[0])
    pair = actual[first].item(), wanted[first].item()
    digits = 6 if f"{pair[0]:.6g}" != f"{pair[1]:.6g}" else 17
    return (
        f"{len(wrong)} of {close.numel()} elements differ; at {first} it has {pair[0]:.{digits}g} "
        f"where one device has {pair[1]:.{digits}g}"
    )
