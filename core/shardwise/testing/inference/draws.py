"""One sample call with several sets of values: a row that holds by accident does not hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwise.errors import ShardingError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.rule import Rows, Rule
from shardwise.kernel.signature import Kind, Op, op_name, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
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


# Factors of the new values, and what is done to them. Some wrong rows hold while all values are on one side of a
# threshold, while no value is zero or equals another, or while at least one value is not zero.
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
    """A sample call, and the same call with other values. ``name`` shows its number and the call."""

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
        tensors = self.first.operands
        return tuple(None if t is None else TensorMeta.of(t) for t in tensors[: len(tensors) - self.first.outs])

    @property
    def outputs(self) -> tuple[TensorMeta | None, ...]:
        """Metas of the tensor results."""
        return tuple(None if t is None else TensorMeta.of(t) for t in self.first.expected.tensors)


def list_spans(trial: Trial) -> list[tuple[int, int]]:
    """The begin and the end of each list of tensors among the flat operands."""
    spans: list[tuple[int, int]] = []
    at = 0
    for arg, value in zip(trial.signature.args, trial.values, strict=True):
        width = 1 if arg.kind is Kind.TENSOR else len(value or ()) if arg.kind is Kind.TENSORS else 0
        spans += [(at, at + width)] if arg.kind is Kind.TENSORS else []
        at += width
    return spans


def probing_rule(op: Op) -> Rule:
    """A rule without rows. A trial needs a rule, and the search has none yet."""

    def no_rows() -> Rows:
        return Rows(())

    return rule_from(op)(no_rows)


def draw(op: Op, number: int, sample: Sample, generator: torch.Generator) -> Draws:
    """The sample and its further draws. Raises :class:`Illegal` if the op refuses the sample.

    A new value of an integer operand lies in the range of the old ones. If the op refuses a draw, or if only the draw
    gives inf or nan, a draw without new negative values is tried, then one with the same integers. If the op refuses
    these too, the draw is left out.
    """
    first = Trial.of(probing_rule(op), op, *sample, op)
    trials = [first]
    for scale, change in _DRAWS:
        # Values of both signs test most. But an operand without negative values may need that, as a variance does.
        for keeps_sign, keeps_integers in ((False, False), (True, False), (True, True)):
            operands: list[Tensor | None] = []
            for tensor in first.operands:
                copy = None if tensor is None else copied(tensor)
                if tensor is not None and copy is not None:
                    # All elements of the memory that the tensor uses: its strides stay, also those that overlap.
                    flat = torch.empty(0, dtype=tensor.dtype).set_(copy.untyped_storage())
                    used = torch.empty(flat.shape, dtype=torch.bool).fill_(False)
                    used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
                    if _has_signs(tensor):
                        flat[used] = change(_new_floats(flat[used], scale, generator, keep_sign=keeps_sign), generator)
                    elif not keeps_integers:
                        flat[used] = _new_integers(flat[used], generator)
                operands.append(copy)
            trial = _legal_trial(first, operands)
            if trial is not None:
                trials.append(trial)
                break
    # A row may depend on the sign of a sum, which may be the same in all draws by chance.
    mirrored = _legal_trial(first, [-t if t is not None and _has_signs(t) else t for t in first.operands])
    if mirrored is not None:
        trials.append(mirrored)
    return Draws(number, f"{number}: {first}", tuple(trials))


def _has_signs(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _new_floats(tensor: Tensor, scale: float, generator: torch.Generator, *, keep_sign: bool) -> Tensor:
    if tensor.is_complex():
        return (torch.randn(tensor.shape, generator=generator, dtype=torch.complex128) * scale).to(tensor.dtype)
    if keep_sign and tensor.numel() and bool((tensor >= 0).all()):
        if bool((tensor <= 1).all()):
            return torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        return (torch.randn(tensor.shape, generator=generator).abs() * scale).to(tensor.dtype)
    return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)


def _new_integers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.numel():
        return tensor
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5  # noqa: PLR2004
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)


def _legal_trial(first: Trial, operands: Sequence[Tensor | None]) -> Trial | None:
    """The trial with other operands; None if the op refuses them, or gives infinite values only now."""
    values = with_operands(first.op, first.values, operands)
    try:
        trial = Trial.of(first.rule, first.op, *first.signature.unbind(values), first.run)
    except Illegal:
        return None
    shapes, before = ([None if t is None else t.shape for t in a.expected.tensors] for a in (trial, first))
    if shapes != before:
        found = f"the shapes of its results depend on the values of {first}: {before}, then {shapes}"
        raise _inference_error(first.op, found)
    return trial if _finite(trial.expected) or not _finite(first.expected) else None


def _finite(answer: Answer) -> bool:
    floats = [t for t in (*answer.tensors, *answer.operands) if t is not None and t.is_floating_point()]
    return all(bool(t.isfinite().all()) for t in floats)


# -- what cannot be probed ---------------------------------------------------------------------------------------


def check_can_be_probed(op: Op) -> None:
    """Raise :class:`InferenceError` for an op whose schema or tags say that running it cannot give a rule."""
    found = None
    if not any(not a.is_out for a in signature(op).tensor_args):
        found = "it takes no tensors"
    elif torch.Tag.nondeterministic_seeded in op.tags:
        found = "it draws random numbers"
    if found:
        raise _inference_error(op, found)


def check_deterministic(trial: Trial) -> None:
    """Raise :class:`InferenceError` for an op that gives different answers to equal calls."""
    expected, mesh = trial.expected, AbstractMesh(())
    for _ in range(2):
        operands = [None if t is None else copied(t) for t in trial.operands]
        args, kwargs = trial.signature.unbind(with_operands(trial.op, trial.values, operands))
        tensors, others = split_results(trial.op, trial.run(*args, **kwargs))
        same = str(others) == str(expected.others)
        for actual, whole in zip((*tensors, *operands), (*expected.tensors, *expected.operands), strict=True):
            spec = None if whole is None else TensorSpec(mesh, (), TensorMeta.of(whole))
            same = same and difference({(): actual}, spec, whole, trial.tolerance) is None
        if not same:
            what = "it draws random numbers, reads memory that nobody wrote or keeps a state"
            raise _inference_error(trial.op, f"two runs of {trial} give different results: {what}")


def _inference_error(op: Op, found: str) -> InferenceError:
    return InferenceError(
        asked=f"infer a rule for {op_name(op)}",
        found=found,
        do="Write the rule by hand: what holds for it cannot be seen by running it.",
        op=op_name(op),
    )


# -- lists -------------------------------------------------------------------------------------------------------


def is_zipped(op: Op) -> bool:
    """Whether the op works position by position on tensor lists: it takes lists, and returns or writes lists."""
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
    # A list of as many numbers has one number per position.
    per_position = [
        a.kind is Kind.TENSORS or (a.kind is Kind.BY_TYPE and a.is_list and len(v or ()) == length)
        for a, v in zip(signature(op).args, values, strict=True)
    ]
    return [
        signature(op).unbind([[v[i]] if one and v else v for one, v in zip(per_position, values, strict=True)])
        for i in range(length)
    ]
