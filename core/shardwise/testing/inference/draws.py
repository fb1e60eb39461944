"""One sample call with several sets of values: a row that holds by accident does not hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.kernel.rule import Rows, Rule
from shardwise.kernel.signature import Arg, Kind, Op, op_name, signature
from shardwise.kernel.spec import AbstractMesh, TensorMeta, TensorSpec
from shardwise.rule.authoring import rule_from
from shardwise.testing.judge import difference
from shardwise.testing.trial import Answer, Illegal, Trial, copied, split_results, with_operands
from shardwise.testing.values import Sample

__all__ = [
    "Draws",
    "InferenceError",
    "check_can_be_probed",
    "check_deterministic",
    "draw",
    "is_zipped",
    "list_spans",
    "positions",
    "probing_rule",
]

Change = Callable[[Tensor, torch.Generator], Tensor]


def _sparse(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return tensor * (torch.rand(tensor.shape, generator=generator) < 0.1)  # noqa: PLR2004


# Factors of the new values, and what is made of them: some rows hold only as long as values stay on one side of a
# threshold, as long as none is zero or equals another, or as long as one is not.
_DRAWS: tuple[tuple[float, Change], ...] = (
    (2.0, lambda t, _: t if t.is_complex() else t.round()),
    (1.0, lambda t, _: t),
    (30.0, lambda t, _: t),
    (1.0, _sparse),
    (1.0, lambda t, _: torch.zeros_like(t)),
)


class InferenceError(ShardingError):
    """Running an op cannot give its rule."""


@frozen(eq=False)
class Draws:
    """A sample call and the same call with other values. ``name`` is how people find it: its number and the call."""

    number: int
    name: str
    trials: tuple[Trial, ...]

    @property
    def first(self) -> Trial:
        """The sample itself, before its further draws."""
        return self.trials[0]

    @property
    def operands(self) -> tuple[TensorMeta | None, ...]:
        """Metas of the operands, except those for ``out=``."""
        outs = out_count(self.first)
        tensors = self.first.operands
        return tuple(None if t is None else TensorMeta.of(t) for t in tensors[: len(tensors) - outs])

    @property
    def outputs(self) -> tuple[TensorMeta | None, ...]:
        """Metas of the tensor results."""
        return tuple(None if t is None else TensorMeta.of(t) for t in self.first.expected.tensors)


def out_count(trial: Trial) -> int:
    """How many of the operands, the last ones, are for ``out=``."""
    values = zip(trial.signature.args, trial.values, strict=True)
    return sum((1 if a.kind is Kind.TENSOR else len(v or ())) for a, v in values if a.is_out)


def list_spans(trial: Trial) -> list[tuple[int, int]]:
    """Where the lists of tensors begin and end among the flat operands."""
    spans: list[tuple[int, int]] = []
    at = 0
    for arg, value in zip(trial.signature.args, trial.values, strict=True):
        width = 1 if arg.kind is Kind.TENSOR else len(value or ()) if arg.kind is Kind.TENSORS else 0
        spans += [(at, at + width)] if arg.kind is Kind.TENSORS else []
        at += width
    return spans


def probing_rule(op: Op) -> Rule:
    """A rule without rows, because a trial needs a rule."""

    def says_nothing() -> Rows:
        return Rows(())

    return rule_from(op)(says_nothing)


def draw(op: Op, number: int, sample: Sample, generator: torch.Generator) -> Draws:
    """The sample and its further draws. Raises :class:`Illegal` when the op refuses the sample.

    A new value of an integer operand lies in the range of the old ones. What the op refuses, or answers with inf or nan
    where it did not before, is drawn in a tamer way (no negative where there was none) or left out.
    """
    rule = probing_rule(op)
    first = Trial.of(rule, op, *sample, op)
    trials = [first]
    for scale, change in _DRAWS:
        for values in _wilder_first(first, scale, change, generator):
            trial = _legal(first, values)
            if trial is not None:
                trials.append(trial)
                break
    return Draws(number, f"{number}: {first}", tuple(trials))


def _wilder_first(
    first: Trial, scale: float, change: Change, generator: torch.Generator
) -> Iterator[list[Tensor | None]]:
    signed: Callable[[Tensor], Tensor] = lambda t: change(_float(t, scale, generator, keep_sign=False), generator)  # noqa: E731
    tame: Callable[[Tensor], Tensor] = lambda t: change(_float(t, scale, generator, keep_sign=True), generator)  # noqa: E731
    whole: Callable[[Tensor], Tensor] = lambda t: _whole(t, generator)  # noqa: E731
    as_they_are: Callable[[Tensor], Tensor] = lambda t: t  # noqa: E731
    # Values of both signs test most. But a float without negative values may have to be so, as a variance.
    for floats, integers in ((signed, whole), (tame, whole), (tame, as_they_are)):
        yield [
            None if t is None else _redrawn(t, floats if t.is_floating_point() or t.is_complex() else integers)
            for t in first.operands
        ]


def _redrawn(tensor: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
    """Other values in the same strides, overlapping ones included."""
    copy = copied(tensor)
    flat = torch.empty(0, dtype=tensor.dtype).set_(copy.untyped_storage())
    used = torch.empty(flat.shape, dtype=torch.bool).fill_(False)
    used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    flat[used] = how(flat[used])
    return copy


def _float(tensor: Tensor, scale: float, generator: torch.Generator, *, keep_sign: bool) -> Tensor:
    if tensor.is_complex():
        return (torch.randn(tensor.shape, generator=generator, dtype=torch.complex128) * scale).to(tensor.dtype)
    if keep_sign and tensor.numel() and bool((tensor >= 0).all()):
        if bool((tensor <= 1).all()):
            return torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        return (torch.randn(tensor.shape, generator=generator).abs() * scale).to(tensor.dtype)
    return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)


def _whole(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.numel():
        return tensor
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5  # noqa: PLR2004
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)


def _legal(first: Trial, operands: Sequence[Tensor | None]) -> Trial | None:
    """The trial with other operands, if it tests as much as the first."""
    values = with_operands(first.op, first.values, operands)
    try:
        trial = Trial.of(first.rule, first.op, *first.signature.unbind(values), first.run)
    except Illegal:
        return None
    shapes, wanted = ([None if t is None else t.shape for t in a.expected.tensors] for a in (trial, first))
    if shapes != wanted:
        raise _refusal(first.op, f"the shapes of its results depend on the values of {first}: {wanted}, then {shapes}")
    return trial if _finite(trial.expected) or not _finite(first.expected) else None


def _finite(answer: Answer) -> bool:
    floats = [t for t in (*answer.tensors, *answer.operands) if t is not None and t.is_floating_point()]
    return all(bool(t.isfinite().all()) for t in floats)


# -- what cannot be probed ---------------------------------------------------------------------------------------


def check_can_be_probed(op: Op) -> None:
    """Raises :class:`InferenceError` for an op whose tags say that running it cannot give a rule."""
    found = None
    if not any(not a.is_out for a in signature(op).tensor_args):
        found = "it takes no tensors"
    elif torch.Tag.nondeterministic_seeded in op.tags:
        found = "it draws random numbers"
    if found:
        raise _refusal(op, found)


def check_deterministic(trial: Trial) -> None:
    """Raises :class:`InferenceError` for an op that gives different answers to equal calls."""
    if not all(_gives_same_answer(trial) for _ in range(2)):
        what = "it draws random numbers, reads memory that nobody wrote or keeps a state"
        raise _refusal(trial.op, f"two runs of {trial} give different results: {what}")


def _refusal(op: Op, found: str) -> InferenceError:
    return InferenceError(
        asked=f"infer a rule for {op_name(op)}",
        found=found,
        do="Write the rule by hand: what holds for it cannot be seen by running it.",
        op=op_name(op),
    )


def _gives_same_answer(trial: Trial) -> bool:
    operands = [None if t is None else copied(t) for t in trial.operands]
    args, kwargs = trial.signature.unbind(with_operands(trial.op, trial.values, operands))
    tensors, others = split_results(trial.op, trial.run(*args, **kwargs))
    expected = trial.expected
    mesh = AbstractMesh(())
    pairs = zip((*tensors, *operands), (*expected.tensors, *expected.operands), strict=True)
    same = all(
        difference({(): actual}, None if w is None else TensorSpec(mesh, (), TensorMeta.of(w)), w, trial.tolerance)
        is None
        for actual, w in pairs
    )
    return same and str(others) == str(expected.others)


# -- lists -------------------------------------------------------------------------------------------------------


def is_zipped(op: Op) -> bool:
    """Whether the op works on the positions of its tensor lists: it has lists, and gives or writes lists."""
    described = signature(op)
    lists = [a for a in described.tensor_args if a.kind is Kind.TENSORS]
    return bool(lists) and (any(r.is_list for r in described.results) or any(a.written for a in lists))


def positions(op: Op, sample: Sample) -> list[Sample]:
    """The sample of a zipped op as one call per list position, each with lists of one element."""
    values = signature(op).bind(*sample)
    lists = [v for a, v in zip(signature(op).args, values, strict=True) if a.kind is Kind.TENSORS and v]
    if len(set(map(len, lists))) != 1:
        return [sample]
    length = len(lists[0])
    numbers = [a.kind is Kind.BY_TYPE and a.is_list and len(v or ()) == length for a, v in _bound(op, values)]
    per_position = [one or a.kind is Kind.TENSORS for one, (a, _) in zip(numbers, _bound(op, values), strict=True)]
    return [
        signature(op).unbind([[v[i]] if one and v else v for one, v in zip(per_position, values, strict=True)])
        for i in range(length)
    ]


def _bound(op: Op, values: Sequence[Any]) -> list[tuple[Arg, Any]]:
    return list(zip(signature(op).args, values, strict=True))
