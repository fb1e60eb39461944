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

from shardwise.kernel.signature import Op, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.dispatch import recorded_ops
from shardwise.private_torch.ops import binding_namespaces, direct_call

__all__ = ["binding"]

# By op and the types of its arguments: a few per op, kept as long as the process.
_known: dict[Any, Callable[..., Any]] = {}


def binding(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[TensorMeta | None] | None = None,
) -> Callable[..., Any]:
    """The fastest callable that runs ``op`` on arguments of these types, among them plain tensors or metas of tensors.

    ``results`` are the metas of what the op returns for these arguments, where they are known: then no kernel runs.
    """
    key = (id(op), *map(_parser_type, args), *((name, _parser_type(value)) for name, value in kwargs.items()))
    call = _known.get(key)
    if call is None:
        call = _find(op, args, kwargs, results)
        if call is None:  # says nothing of other arguments of these types: operands may have yet to be moved
            return direct_call(op)
        _known[key] = call
    return call


def _find(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorMeta | None] | None = None
) -> Callable[..., Any] | None:
    """What runs the op like its own call; None if that raises on these arguments."""
    call, trial = direct_call(op), _Trial(op, args, kwargs, results)
    effect = trial.effect(call)
    if effect is None:
        return None
    if [name for name, _ in effect] != [op]:
        return call
    return next((c for c in _candidates(op) if trial.effect(c) == effect), call)


def _parser_type(value: Any) -> Any:
    """The type of a value as torch's argument parser sees it. It accepts a 0-dim tensor as a number of its dtype, and a
    list of one element as that element.
    """
    if isinstance(value, (torch.Tensor, TensorMeta)):
        return torch.Tensor, value.dtype if value.ndim == 0 else None
    if isinstance(value, (list, tuple)):
        return list, min(len(value), 2), frozenset(map(_parser_type, value))
    return type(value)


@cache
def _candidates(op: Op) -> tuple[Callable[..., Any], ...]:
    """The functions and methods in C with an op's name."""
    name = op.overloadpacket.__name__
    named = (getattr(space, name, None) for space in binding_namespaces())
    return tuple(f for f in named if isinstance(f, (BuiltinFunctionType, MethodDescriptorType)))


class _Trial:
    """A call on the meta device, with tensors of its own for each of the functions in question.

    Where its results are known the op itself does not run: what matters is that it is reached. Python's references are
    the meta kernels of many ops, and slower than all the rest of planning a call.
    """

    def __init__(
        self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[TensorMeta | None] | None
    ) -> None:
        self._op = op
        self._call = args, kwargs
        self._results = results if results is not None and self._can_be_made(results) else None
        self._tensors: dict[int, Any] = {}
        self._values: list[Any] = []

    def effect(self, call: Callable[..., Any]) -> list[tuple[Any, Any]] | None:
        """The ops that a call runs, with a description of their arguments; ``None`` when it raises."""
        self._tensors = {}
        args, kwargs = self._call
        args, kwargs = [self._stand_in(v) for v in args], {name: self._stand_in(v) for name, v in kwargs.items()}
        self._values = signature(self._op).bind(args, kwargs)
        try:
            ops = recorded_ops(call, args, kwargs, self._run)
        except Exception:  # noqa: BLE001  # a candidate that raises, whatever it raises, is not the op
            return None
        return [(op, tuple(_described((a, k), self._tensors))) for op, a, k in ops]

    def _run(self, op: Op, args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs) if op is not self._op or self._results is None else self._made(self._results)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, TensorMeta)):
            meta = value if isinstance(value, TensorMeta) else TensorMeta.of(value)
            tensor = meta.to_meta_tensor()
            self._tensors[id(tensor)] = (len(self._tensors), tensor)
            return tensor
        return [self._stand_in(v) for v in value] if isinstance(value, (list, tuple)) else value

    def _can_be_made(self, metas: Sequence[TensorMeta | None]) -> bool:
        results = signature(self._op).results
        if len(results) == 1 and results[0].is_list:
            return not results[0].written
        return len(results) == len(metas) and all(r.is_tensor and not r.is_list for r in results)

    def _made(self, metas: Sequence[TensorMeta | None]) -> Any:
        """The results of the op. What it writes is the argument itself. All else is made anew at each call, for a C
        function that makes a tensor detaches one that somebody else has, too.
        """
        results = signature(self._op).results
        if not results:
            return None
        tensors = [None if meta is None else meta.to_meta_tensor() for meta in metas]
        if results[0].is_list:
            return tensors
        made = [
            self._values[r.alias] if r.alias is not None and (r.written or r.reseats) else t
            for r, t in zip(results, tensors, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)


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
