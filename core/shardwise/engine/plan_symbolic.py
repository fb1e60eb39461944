"""Calls with symbols for sizes, as ``torch.compile`` traces them where a size may change.

Which strategies are legal follows from the symbols: where a rule branches on one, torch notes the answer as a guard.
Which is cheapest follows from the numbers that the graph was made for, and needs no guard, since any legal strategy
gives the same values. The first choice stays: a rank that makes its graph again must issue the same collectives as the
other ranks, whose graphs were made for other numbers.

Some code cannot compute with symbols (a rule that hashes a size, an op without a symbolic kernel). It gets numbers, and
these become guards: the graph then holds for this size alone, and another size makes another graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve

from shardwise.engine.make_plan import DescribedCall, make_plan
from shardwise.engine.plan_call import common_mesh, describe_call
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.rule import AnyRule, FullMeshRule, Row
from shardwise.kernel.schema import OpSchema, PlacementStrategy, RuntimeSchemaInfo
from shardwise.kernel.signature import Call, op_name, signature
from shardwise.kernel.spec import SymbolicSpec, TensorSpec, hinted, hinted_meta, in_numbers
from shardwise.kernel.symbols import hint, is_symbolic, lengths
from shardwise.planning.chooser import Chooser
from shardwise.planning.problem import Choice, Problem
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import problems
from shardwise.private_torch.tracing import make_known, outside_modes, without_data
from shardwise.rule.lowering import LocalCall

__all__ = ["forget_choices", "plan_symbolic_call"]

_log = logging.getLogger(__name__)

# By the call without its symbols: the chosen rows, one per mesh dim.
_chosen: dict[Any, tuple[Row, ...]] = {}


def forget_choices() -> None:
    """Forget the choices: some rule changed."""
    _chosen.clear()


def plan_symbolic_call(
    cls: type, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Plan:
    """As :func:`shardwise.engine.plan_call.plan_call`, for a call whose key has no hash. The plan is for this call
    alone.
    """
    # Arithmetic on sizes here is not part of the graph: where the graph needs a size, torch writes its formula.
    with outside_modes():
        return _plan(cls, entry, info, args, kwargs)


def _plan(cls: type, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
    op = entry.op
    values = signature(op).bind(args, kwargs)
    schema, described = describe_call(cls, entry, info, common_mesh(cls, op, values), values)
    if not any(map(_has_symbol, schema.values)):
        hash(schema.key)  # raises, and says of what
    try:
        outputs = _outputs(entry, described, _a_part(cls, values))
        plan = make_plan(DescribedCall.of(entry, schema, outputs), _cheapest)
    except Exception as error:  # noqa: BLE001  # whatever a rule or a kernel does with a symbol
        _log.info("%s is compiled for its sizes alone: %s: %s", op_name(op), type(error).__name__, error)
        return _plan_of_numbers(entry, schema, described)
    for value in plan.static or ():
        make_known(value if isinstance(value, (tuple, list)) else (value,))
    plan.run_by(_or_by_numbers(op_name(op), plan.call))
    return plan


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbol, value))
    return isinstance(value, (SymbolicSpec, torch.SymInt, torch.SymFloat, torch.SymBool))


def _a_part(cls: type, values: Sequence[Any]) -> torch.Tensor:
    """The local tensor of some operand."""
    flat = (part for v in values for part in (v if isinstance(v, (list, tuple)) else (v,)))
    operand: Any = next(v for v in flat if isinstance(v, cls))
    part: torch.Tensor = operand._local_tensor
    return part


def _outputs(entry: Entry, described: Sequence[Any], part: torch.Tensor) -> Any:
    if torch.Tag.dynamic_output_shape in entry.op.tags:
        raise NotImplementedError("data decides the shape of its result")
    with without_data(part):
        metas = output_metas(entry.op, described, entry.rule.meta)
    if metas is None:
        raise NotImplementedError("the shape of its result is unknown")
    for meta in metas:
        make_known(() if meta is None else (*meta.shape, *meta.stride))
    return metas


# -- the choice --------------------------------------------------------------------------------------------------------


def _cheapest(rule: AnyRule, schema: OpSchema, call: Call) -> list[PlacementStrategy]:
    """:func:`shardwise.planning.strategies.cheapest` of symbols."""
    if isinstance(rule, FullMeshRule) or rule.zip_lists:
        raise NotImplementedError("its rule needs numbers")
    return [_choose(problem) for problem in problems(rule, schema, call)]


def _choose(problem: Problem) -> PlacementStrategy:
    stated = _of_numbers(problem)
    key = _without_symbols(problem.schema)
    choice = _chosen_before(stated, _chosen.get(key))
    if choice is None:
        choice = Chooser(stated).best()[0]
        _chosen[key] = tuple(stated.rows[r] for r in choice)
    _guard(problem, stated, choice)
    return problem.strategy(choice, stated.strategy(choice).redistribute_cost)


def _of_numbers(problem: Problem) -> Problem:
    """The problem with the sizes that the graph was made for."""
    return evolve(
        problem,
        rows=tuple(evolve(r, divides=tuple((i, d, hint(n)) for i, d, n in r.divides)) for r in problem.rows),
        specs=tuple(None if s is None else hinted(s) for s in problem.specs),
        outputs=tuple(None if m is None else hinted_meta(m) for m in problem.outputs),
    )


def _without_symbols(schema: OpSchema) -> Any:
    def shown(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            sizes = tuple(None if is_symbolic((n,)) else n for n in value.shape)
            return value.layout, sizes, value.dtype
        if isinstance(value, tuple):
            return tuple(map(shown, value))
        return type(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value

    return schema.op, *((type(value), shown(value)) for value in schema.values)


def _chosen_before(stated: Problem, rows: tuple[Row, ...] | None) -> Choice | None:
    """The choice for an earlier call that differs in symbols alone, where it is still legal."""
    if rows is None or any(row not in stated.rows for row in rows):
        return None
    choice = tuple(stated.rows.index(row) for row in rows)
    legal = all(r in stated.candidates(m) and stated.conflict(choice[: m + 1]) is None for m, r in enumerate(choice))
    return choice if legal else None


def _guard(problem: Problem, stated: Problem, choice: Choice) -> None:
    """Make guards of what made a choice legal."""
    for r in dict.fromkeys(choice):
        for i, d, n in problem.rows[r].divides:
            if n % math.prod(stated.splits(choice, i, d)) != 0:
                raise AssertionError("a choice that is legal for the numbers is not for the symbols")
        for i, d in problem.rows[r].nonempty:
            spec = problem.specs[i]
            sizes: list[Any] = [] if spec is None else [spec.shape[d]]
            for parts in stated.splits(choice, i, d):
                sizes = [n for size in sizes for n in lengths(size, parts)]
            if not all(n > 0 for n in sizes):
                raise AssertionError("a choice that is legal for the numbers is not for the symbols")


# -- numbers for symbols -----------------------------------------------------------------------------------------------


def _plan_of_numbers(entry: Entry, schema: OpSchema, described: Sequence[Any]) -> Plan:
    """The plan with numbers in place of all symbols; they become guards of the graph."""
    stated = OpSchema(schema.op, in_numbers(schema.values), schema.info, schema.fixed)
    given = in_numbers(tuple(described))
    return make_plan(DescribedCall.of(entry, stated, output_metas(entry.op, given, entry.rule.meta)))


def _or_by_numbers(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The local call, with numbers where it fails on symbols."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # as above
            _log.info("%s is compiled for its sizes alone: %s: %s", name, type(error).__name__, error)
            with outside_modes():
                args, kwargs = tuple(map(in_numbers, args)), {n: in_numbers(v) for n, v in kwargs.items()}
                stated = _lowering_of_numbers(call) if isinstance(call, partial) else call
            return stated(*args, **kwargs)

    return run


def _lowering_of_numbers(lowered: partial[Any]) -> Callable[..., Any]:
    local: LocalCall = lowered.args[0]
    call = local.call
    args = {name: in_numbers(value) for name, value in call.args.items()}
    stated = Call(call.op, args, in_numbers(call.outputs), call.is_position)
    inputs, outputs = in_numbers(local.inputs), in_numbers(local.outputs)
    return partial(lowered.func, LocalCall(stated, inputs, outputs, local.coordinate, local.comm))
