"""``register_sharding``: shardwise rules from the acceptable shardings of a call, as torch writes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attrs import evolve

from shardwise import override
from shardwise.errors import RuleError
from shardwise.rule import Call, Kind, Op, Placement, Row, Rows, Rule, rule_from, signature
from shardwise_dtensor.classic import keep

__all__ = ["register_sharding"]

Places = Sequence[Placement | None]
Function = TypeVar("Function", bound=Callable[..., Sequence[tuple[Places, Places]]])


def register_sharding(op: Op | list[Op]) -> Callable[[Function], Function]:
    """Decorator: a function of a call's arguments that returns its acceptable shardings, as the rule of an op here.

    The function has the op's arguments, and gets a :class:`shardwise.TensorMeta` (``shape``, ``ndim``, ``stride``,
    ``dtype``) in place of each tensor. It returns pairs of lists: placements of the results and placements of the
    arguments on one mesh dim, ``None`` for what is not a tensor. Shardwise combines them over the mesh dims.

    The rule holds from now on in this process, before the rules of all plugins; every rank must register it at the same
    point. :func:`rules_of` gives it too, for a plugin's hook and for :func:`shardwise.testing.check_rule`. Returns the
    function. A pair that does not fit the call raises :class:`RuleError` at the first call.
    """
    ops = list(op) if isinstance(op, (list, tuple)) else [op]

    def decorate(function: Function) -> Function:
        for one in ops:
            rule = _rule(one, function)
            keep(function.__globals__, one, rule)
            override(rule)
        return function

    return decorate


def _rule(op: Op, function: Callable[..., Any]) -> Rule:
    # All values key a plan: the function may read any of them.
    static = [a.name for a in signature(op).args if a.kind is Kind.BY_TYPE]

    def rows(**arguments: Any) -> Callable[[Call], Rows]:
        acceptable = function(**arguments)
        return lambda call: Rows(tuple(_row(call, outputs, inputs, source) for outputs, inputs in acceptable))

    rows.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # which rule_from reads
    code = function.__code__
    source = f"{code.co_filename}:{code.co_firstlineno}"
    text = f"acceptable shardings {function.__name__}"
    return evolve(rule_from(op, static=static)(rows), source=source, text=text, form="register_sharding")


def _row(call: Call, outputs: Places, inputs: Places, source: str) -> Row:
    """One pair as a row. ``out=`` tensors lie as the results; the placements that a pair gives them are not read."""
    given = [p for p in inputs if p is not None]
    results = [p for p in outputs if p is not None]
    present = [meta is not None for meta in call.operands]
    count, out = sum(present), sum(meta is not None for meta in call.out_operands)
    if len(given) not in (count, count + out) or len(results) != len(call.outputs):
        raise RuleError(
            asked=f"read an acceptable sharding of {call} at {source}",
            found=f"it has placements for {len(results)} results and {len(given)} tensor arguments; the call has "
            f"{len(call.outputs)} and {count}",
            do="Return pairs ([one for each result], [one for each argument, None for what is not a tensor]).",
            op=str(call.op),
        )
    left = iter(given)
    placed = [next(left) if here else None for here in present]
    return Row((*placed, *results[:out]), tuple(results))
