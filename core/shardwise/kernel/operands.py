"""Operands that are not exactly MeshTensors: numbers, subclasses, plain tensors; and calls for the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import PlainTensorError
from shardwise.kernel.engine import started
from shardwise.kernel.signature import Op, op_name

__all__ = ["NUMBERS", "PLAIN", "on_meta", "operand_of", "operands_of"]

NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that reach the dispatcher in place of a tensor: ``x + 1`` is ``add.Tensor(x, 1)``."""

PLAIN = frozenset({*NUMBERS, type(None)})
"""The types of operands that a handler passes on as they are."""


def operand_of(
    op: Op, written: bool, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Key part and local tensor of an operand that is not exactly a MeshTensor: a number, a subclass, a plain tensor.

    Raises :class:`PlainTensorError` for anything else.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, started.tensor_class):
        return started.engine.plain_operands(op, {name: value}, args, kwargs, written)[0], value
    return _other_operand(op, name, value)


def operands_of(
    op: Op, written: bool, name: str, values: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], list[Any]]:
    """Key part and local tensors of a list in which not all are MeshTensors; see :func:`operand_of`."""
    is_plain = [isinstance(v, torch.Tensor) and not isinstance(v, started.tensor_class) for v in values]
    plain = {f"{name}[{i}]": v for i, v in enumerate(values) if is_plain[i]}
    keys = iter(started.engine.plain_operands(op, plain, args, kwargs, written) if plain else ())
    pairs = [(next(keys), v) if is_plain[i] else _other_operand(op, f"{name}[{i}]", v) for i, v in enumerate(values)]
    return tuple([key for key, _ in pairs]), [local for _, local in pairs]


def _other_operand(op: Op, name: str, value: Any) -> tuple[Any, Any]:
    if value is None or isinstance(value, NUMBERS):
        return type(value), value
    if isinstance(value, started.tensor_class):
        return value._spec, value._local_tensor  # type: ignore[attr-defined]
    raise PlainTensorError(
        asked=f"run {op_name(op)} on MeshTensors",
        found=f"its argument {name!r} is a {type(value).__name__}",
        do="Pass a tensor there.",
        op=op_name(op),
        argument=name,
        shape=None,
    )


def on_meta(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The plain result on the meta device, as ``x.to("meta")`` asks for."""

    def meta(value: Any) -> Any:
        if isinstance(value, started.tensor_class):
            return value._spec.tensor_meta.to_meta_tensor()  # type: ignore[attr-defined]
        return [meta(part) for part in value] if isinstance(value, (tuple, list)) else value

    return op(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()})
