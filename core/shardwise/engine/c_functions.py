"""The C function behind an op: what ``torch.add`` calls, without the Python of ``OpOverload.__call__``.

A function of torch's public namespaces chooses its overload by the types of its arguments, so a function with an op's
name may run another op. :func:`binding` tries the candidates once per combination of argument types, on meta tensors.
It returns a candidate only if exactly this op reaches torch's dispatcher, once, with exactly these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from shardwise.kernel.signature import Op
from shardwise.private_torch.dispatch import recorded_ops
from shardwise.private_torch.ops import binding_namespaces, direct_call

__all__ = ["binding"]

# By op and the types of its arguments: a few per op, kept as long as the process.
_known: dict[Any, Callable[..., Any]] = {}


def binding(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The fastest callable that runs ``op`` on arguments of these types; tensors must be plain local ones."""
    key = (id(op), *map(_parser_type, args), *((name, _parser_type(value)) for name, value in kwargs.items()))
    call = _known.get(key)
    if call is None:
        call = _find(op, args, kwargs)
        if call is None:  # says nothing of other arguments of these types: operands may have yet to be moved
            return direct_call(op)
        _known[key] = call
    return call


def _find(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What runs the op like its own call; None if that raises on these arguments."""
    call = direct_call(op)
    effect = _effect(call, args, kwargs)
    if effect is None:
        return None
    if [name for name, _ in effect] != [op]:
        return call
    return next((c for c in _candidates(op) if _effect(c, args, kwargs) == effect), call)


def _parser_type(value: Any) -> Any:
    """The type of a value as torch's argument parser sees it. It accepts a 0-dim tensor as a number of its dtype, and a
    list of one element as that element.
    """
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype if value.dim() == 0 else None
    if isinstance(value, (list, tuple)):
        return list, min(len(value), 2), frozenset(map(_parser_type, value))
    return type(value)


@cache
def _candidates(op: Op) -> tuple[Callable[..., Any], ...]:
    """The functions and methods in C with an op's name."""
    name = op.overloadpacket.__name__
    named = (getattr(space, name, None) for space in binding_namespaces())
    return tuple(f for f in named if isinstance(f, (BuiltinFunctionType, MethodDescriptorType)))


def _effect(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]] | None:
    """The ops that a call runs, with a description of their arguments; ``None`` when it raises."""
    tensors: dict[int, Any] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            tensors[id(tensor)] = (len(tensors), tensor)
            return tensor
        return [stand_in(v) for v in value] if isinstance(value, (list, tuple)) else value

    stand_ins = [stand_in(v) for v in args], {name: stand_in(v) for name, v in kwargs.items()}
    try:
        ops = recorded_ops(call, *stand_ins)
    except Exception:  # noqa: BLE001  # a candidate that raises, whatever it raises, is not the op
        return None
    return [(op, tuple(_described((a, k), tensors))) for op, a, k in ops]


def _described(value: Any, tensors: Mapping[int, Any]) -> Iterator[Any]:
    """The leaves of arguments: an operand by its number, anything else by type and value."""
    if isinstance(value, torch.Tensor):
        number = tensors.get(id(value), (None,))[0]
        yield number if number is not None else (value.dtype, tuple(value.shape))
    elif isinstance(value, (list, tuple)):
        yield "("
        for part in value:
            yield from _described(part, tensors)
        yield ")"
    elif isinstance(value, dict):
        for name in sorted(value):
            yield name
            yield from _described(value[name], tensors)
    else:
        yield type(value), value
