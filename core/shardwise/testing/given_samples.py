"""The samples that an author gives: what is no sample call of the op is an error that says which one and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise.errors import RuleError, warn_user
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.testing.values import Sample

__all__ = ["given_samples", "warn_of_large"]

_MANY = 1 << 18
"""Elements of a sample beyond which a warning says what they cost: each sample runs some hundred times."""

_DO = "Write each as (args, kwargs) with whole CPU tensors, as in ((made((8, 6)),), {})."


def given_samples(op: Op, given: Callable[[], Iterable[Sample]] | Iterable[Sample]) -> list[Sample]:
    """The samples of an op as a list. Raises :class:`RuleError` for what is no call of it."""
    samples: Any = given
    if callable(given):
        try:
            samples = given()
        except Exception as error:  # noqa: BLE001  # an author's code may raise anything
            _refuse(op, f"the function of its samples raised {type(error).__name__}: {error}", "Correct it.", error)
    if not isinstance(samples, Iterable) or isinstance(samples, (str, Mapping, Tensor)):
        _refuse(op, f"its samples are {kind_of(samples)}, not a list", f"Give a list. {_DO}")
    listed = list(samples)
    for i, sample in enumerate(listed):
        if fault := _fault(op, sample):
            _refuse(op, f"sample {i} {fault}", _DO)
    return listed


def warn_of_large(op: Op, samples: Iterable[Sample]) -> None:
    """Warn of a sample that takes long."""
    for i, sample in enumerate(samples):
        size = max((t.numel() for t in tensors_in(sample)), default=0)
        if size > _MANY:
            warn_user(
                f"sample {i} of {op_name(op)} has {size:,} elements, and each sample runs some hundred times. "
                "Dims of 5 to 12 show as much.",
                RuntimeWarning,
            )


def _fault(op: Op, sample: Any) -> str:  # noqa: PLR0911  # a return for each slip
    """Why a value is no call of the op; empty if it may be one."""
    if not (isinstance(sample, (tuple, list)) and len(sample) == 2):  # noqa: PLR2004  # args and kwargs
        return f"is {kind_of(sample)}, not a pair of arguments and keyword arguments"
    args, kwargs = sample
    if not (isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)):
        return f"has {kind_of(args)} and {kind_of(kwargs)}, not a tuple of arguments and a dict of keyword arguments"
    of_op = signature(op)
    positional = [arg.name for arg in of_op.args if not arg.kwarg_only]
    if len(args) > len(positional):
        return f"has {len(args)} arguments, and the op takes {len(positional)}: {', '.join(positional)}"
    known = [arg.name for arg in of_op.args]
    for name in kwargs:
        if name not in known:
            return f"has the keyword argument {name!r}, and the op takes {', '.join(known)}"
        if name in positional[: len(args)]:
            return f"has {name!r} twice, by its place and by its name"
    tensors = list(tensors_in(sample))
    if of_op.tensor_args and not tensors:
        return "has no tensor"
    odd = next((t for t in tensors if t.device.type != "cpu" or t.layout is not torch.strided), None)
    return "" if odd is None else f"has a tensor of layout {odd.layout} on {odd.device}"


def _refuse(op: Op, found: str, do: str, cause: Exception | None = None) -> NoReturn:
    raise RuleError(asked=f"judge the rule of {op_name(op)} by samples", found=found, do=do, op=op_name(op)) from cause
