"""The features in which calls of one op differ, as expressions that a rule's function can evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from attrs import frozen

from shardwise.kernel.signature import Kind, Op, signature
from shardwise.testing.inference.draws import probing_rule
from shardwise.testing.inference.verdicts import Group, call_of, static_args

__all__ = ["Feature", "features", "joined", "telling"]


@frozen
class Feature:
    """An expression, the arguments that it reads, and its value for each group of samples.

    Every case must read a feature that is ``always`` true here: nothing is known of calls with another value of it.
    """

    text: str
    uses: tuple[str, ...]
    values: tuple[Any, ...]
    always: bool


_Template = tuple[str, Callable[[Any], Any], bool]
_OF_TENSORS: tuple[_Template, ...] = (
    ("{}.ndim", lambda meta: meta.ndim, True),
    ("tuple(n == 1 for n in {}.shape)", lambda meta: tuple(n == 1 for n in meta.shape), False),
)
_OF_LISTS: tuple[_Template, ...] = (
    ("len({})", len, True),
    (
        "tuple(None if t is None else t.ndim for t in {})",
        lambda metas: tuple(None if m is None else m.ndim for m in metas),
        True,
    ),
)


def features(op: Op, groups: Sequence[Group], *, zipped: bool) -> list[Feature]:
    """All features of the groups: numbers of dims, the dims that have one element, and static arguments."""
    probing = probing_rule(op)
    calls = [call_of(probing, group.searches[0].draws, zipped=zipped).args for group in groups]
    statics = [static_args(group.searches[0].draws) for group in groups]
    all_features: list[Feature] = []
    for arg in signature(op).args:
        if arg.name in statics[0]:
            values = tuple(static[arg.name] for static in statics)
            if all(map(_can_be_written, values)):
                all_features.append(Feature(arg.name, (arg.name,), values, arg.kind is Kind.BY_VALUE))
        elif not arg.is_out:
            operands = [call[arg.name] for call in calls]
            is_list = any(isinstance(operand, tuple) for operand in operands)
            absent = any(operand is None for operand in operands)
            for template, of, always in _OF_LISTS if is_list else _OF_TENSORS:
                text = template.format(arg.name)
                text = f"(None if {arg.name} is None else {text})" if absent else text
                values = tuple(None if operand is None else of(operand) for operand in operands)
                all_features.append(Feature(text, (arg.name,), values, always))
    return all_features


def _can_be_written(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_can_be_written, value))
    return (
        value is None
        or isinstance(value, (bool, int, str, torch.dtype))
        or (isinstance(value, float) and math.isfinite(value))
    )


def telling(candidates: Sequence[Feature], branch: Sequence[int]) -> list[Feature] | None:
    """The features that tell groups of different branches apart: those of every case, and as few others as possible.

    ``branch`` has a number for each group. Returns None if no features do.
    """
    base = [feature for feature in candidates if feature.always]
    more = [feature for feature in candidates if not feature.always]
    for n in range(len(more) + 1):
        for extra in combinations(more, n):
            chosen = [*base, *extra]
            branch_of: dict[str, int] = {}
            values = [repr([feature.values[i] for feature in chosen]) for i in range(len(branch))]
            if chosen and all(branch_of.setdefault(v, b) == b for v, b in zip(values, branch, strict=True)):
                return chosen
    return None


def joined(several: Sequence[Feature]) -> Feature:
    """Several features as one, whose value is a tuple."""
    if len(several) == 1:
        return several[0]
    return Feature(
        f"({', '.join(f.text for f in several)})",
        tuple(name for f in several for name in f.uses),
        tuple(zip(*(f.values for f in several), strict=True)),
        always=True,
    )
