"""Calls with symbols for sizes, as ``torch.compile`` traces them where a size may change.

The symbols decide which strategies are legal: where a rule branches on one, torch notes the answer as a guard. The
numbers that the graph was made for decide which strategy is cheapest. That needs no guard, since any legal strategy
gives the same values. The first choice stays: a rank that makes its graph again must issue the same collectives as the
other ranks, whose graphs were made for other numbers.

Some code cannot compute with symbols (a rule that hashes a size, an op without a symbolic kernel). It gets numbers, and
these become guards: the graph then holds for this size alone, and another size makes another graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve

from shardwise.engine.first_run import put_in_order
from shardwise.engine.make_plan import DescribedCall, make_plan
from shardwise.engine.plain_tensors import refuse_foreign
from shardwise.engine.plan_call import common_mesh, describe_call
from shardwise.errors import TracingError
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.rule import AnyRule, FullMeshRule, Row
from shardwise.kernel.schema import OpSchema, PlacementStrategy, RuntimeSchemaInfo
from shardwise.kernel.signature import Call, op_name, signature
from shardwise.kernel.spec import SymbolicSpec, TensorSpec, hinted, hinted_meta, in_numbers
from shardwise.kernel.symbols import hint, is_symbolic, lengths
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.chooser import best
from shardwise.planning.problem import Choice, Problem
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import problems
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.sizes import NoNumberError, is_open, make_known
from shardwise.private_torch.tracing import is_layout_only, without_data
from shardwise.rule.lowering import LocalCall

__all__ = ["forget_choices", "plan_symbolic_call"]

_log = logging.getLogger(__name__)

# By the call without its symbols: the chosen rows, one per mesh dim.
_chosen: dict[Any, tuple[Row, ...]] = {}


def forget_choices() -> None:
    """Drop the choices: some rule changed."""
    _chosen.clear()


def plan_symbolic_call(
    cls: type, entry: Entry, info: RuntimeSchemaInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Plan:
    """As :func:`shardwise.engine.plan_call.plan_call`, for one call whose key has no hash."""
    op = entry.op
    # Arithmetic on sizes here is not part of the graph: where the graph needs a size, torch writes its formula.
    with outside_modes():
        values = signature(op).bind(args, kwargs)
        refuse_foreign(cls, op, values)
        schema, arguments = describe_call(cls, entry, info, common_mesh(cls, op, values), values)
        if not any(map(_has_symbol, schema.values)):
            hash(schema.key)  # raises, and names the value without a hash
        local = next(_local_tensors(cls, values))
        try:
            metas = _result_metas(entry, schema, arguments, local)
            plan = make_plan(DescribedCall.of(entry, schema, metas), _cheapest)
        except Exception as error:  # noqa: BLE001  # a rule or a kernel may do anything with a symbol
            _log.info("%s is compiled for its sizes alone: %s: %s", op_name(op), type(error).__name__, error)
            try:
                schema = OpSchema(op, in_numbers(schema.values), schema.info, schema.fixed)
                numbers = in_numbers(tuple(arguments))
            except NoNumberError as unknown:
                refusal = TracingError(
                    asked=f"compile {op_name(op)}",
                    found="data decides a size of an operand, such as how many elements a mask selects, and the rule "
                    "or the kernel needs a number",
                    do="Leave the call out of compiled code, or select nothing: torch.where(mask, new, old) writes as "
                    "old[mask] = new does.",
                )
                if is_layout_only(local):  # dynamo ends its graph before the call, or has no other graph and says this
                    raise NoNumberError(unknown.cond, f"{type(refusal).__name__}: {refusal}") from refusal
                raise refusal from unknown
            return put_in_order(make_plan(DescribedCall.of(entry, schema, output_metas(op, numbers, entry.rule.meta))))
        for value in plan.static or ():
            make_known(value if isinstance(value, (tuple, list)) else (value,))
        plan.run_by(_or_by_numbers(op_name(op), plan.call))
        return put_in_order(plan)


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbol, value))
    return isinstance(value, (SymbolicSpec, torch.SymInt, torch.SymFloat, torch.SymBool))


def _local_tensors(cls: type, values: Sequence[Any]) -> Iterator[torch.Tensor]:
    flat = (part for v in values for part in (v if isinstance(v, (list, tuple)) else (v,)))
    return (operand._local_tensor for operand in flat if isinstance(operand, cls))  # type: ignore[attr-defined]


def _result_metas(
    entry: Entry, schema: OpSchema, arguments: Sequence[Any], local: torch.Tensor
) -> tuple[TensorMeta | None, ...]:
    """The metas of the results, in symbols; ``local`` is any traced tensor of the call."""
    if torch.Tag.dynamic_output_shape in entry.op.tags and not _has_integers(schema):
        raise NotImplementedError("data decides the shape of its result")
    with without_data(local):
        metas = output_metas(entry.op, arguments, entry.rule.meta)
    if metas is None:
        raise NotImplementedError("the shape of its result is unknown")
    for meta in metas:
        make_known(() if meta is None else (*meta.shape, *meta.stride))
    return metas


def _has_integers(schema: OpSchema) -> bool:
    """Whether a call has a list of indices and no mask among them, so that their shapes decide that of the result."""
    lists = [value for value in schema.values if isinstance(value, tuple)]
    dtypes = {spec.dtype for value in lists for spec in value if isinstance(spec, TensorSpec)}
    return bool(dtypes) and not dtypes & {torch.bool, torch.uint8}


# -- the choice --------------------------------------------------------------------------------------------------------


def _cheapest(rule: AnyRule, schema: OpSchema, call: Call) -> list[PlacementStrategy]:
    """:func:`shardwise.planning.strategies.cheapest` of symbols."""
    if any(map(_is_decided_by_data, (*schema.specs, *call.outputs))):
        return [_on_whole_tensors(schema, call)]
    if isinstance(rule, FullMeshRule) or rule.zip_lists:
        raise NotImplementedError("its rule needs numbers")
    chosen = []
    for problem in problems(rule, schema, call):
        hinted_problem = evolve(
            problem,
            rows=tuple(evolve(r, divides=tuple((i, d, hint(n)) for i, d, n in r.divides)) for r in problem.rows),
            specs=tuple(None if s is None else hinted(s) for s in problem.specs),
            outputs=tuple(None if m is None else hinted_meta(m) for m in problem.outputs),
        )
        choice = _choice(hinted_problem, _without_symbols(schema))
        _guard(problem, hinted_problem, choice)
        chosen.append(problem.strategy(choice, hinted_problem.strategy(choice).redistribute_cost))
    return chosen


def _is_decided_by_data(tensor: TensorSpec | TensorMeta | None) -> bool:
    """Whether a size has no number before the graph runs, so that no strategy is known to be cheaper than another."""
    return tensor is not None and any(map(is_open, tensor.shape))


def _on_whole_tensors(schema: OpSchema, call: Call) -> PlacementStrategy:
    """Every operand and every result replicated. That is right for each op that gives the same for the same operands,
    and asks nothing of a size.
    """
    stay = [schema.specs[i] for i in (*schema.written, *schema.fixed)]
    if schema.signature.draws or any(spec is not None and not spec.is_replicated for spec in stay):
        raise NotImplementedError("data decides a size of an operand, and the op cannot run on whole tensors")
    mesh = schema.mesh
    whole = (REPLICATE,) * mesh.ndim
    inputs = tuple(None if s is None else s if s.is_replicated else s.with_placements(whole) for s in schema.specs)
    outputs = tuple(None if meta is None else TensorSpec(mesh, whole, meta) for meta in call.outputs)
    return PlacementStrategy(inputs, outputs, (0.0,) * len(inputs), ("on whole tensors",) * mesh.ndim)


def _without_symbols(schema: OpSchema) -> Any:
    """A key of a call in which all symbols are equal."""

    def part(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            sizes = tuple(None if is_symbolic((n,)) else n for n in value.shape)
            return value.layout, sizes, value.dtype
        if isinstance(value, tuple):
            return tuple(map(part, value))
        return type(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value

    return schema.op, *((type(value), part(value)) for value in schema.values)


def _choice(problem: Problem, key: Any) -> Choice:
    """The choice for an earlier call that differs in symbols alone, if it is still legal; else the cheapest one."""
    rows = _chosen.get(key)
    if rows is not None and all(row in problem.rows for row in rows):
        choice = tuple(problem.rows.index(row) for row in rows)
        if all(r in problem.candidates(m) and problem.conflict(choice[: m + 1]) is None for m, r in enumerate(choice)):
            return choice
    choice = best(problem)[0]
    _chosen[key] = tuple(problem.rows[r] for r in choice)
    return choice


def _guard(problem: Problem, hinted_problem: Problem, choice: Choice) -> None:
    """Make guards of the conditions under which a choice is legal."""
    for r in dict.fromkeys(choice):
        for i, d, n in problem.rows[r].divides:
            if n % math.prod(hinted_problem.splits(choice, i, d)) != 0:
                raise AssertionError("a choice that is legal for the numbers is not for the symbols")
        for i, d in problem.rows[r].nonempty:
            spec = problem.specs[i]
            sizes: list[Any] = [] if spec is None else [spec.shape[d]]
            for parts in hinted_problem.splits(choice, i, d):
                sizes = [n for size in sizes for n in lengths(size, parts)]
            if not all(n > 0 for n in sizes):
                raise AssertionError("a choice that is legal for the numbers is not for the symbols")


# -- numbers for symbols -----------------------------------------------------------------------------------------------


def _or_by_numbers(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The local call. Where it fails on symbols it runs again with numbers, which become guards of the graph."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # as above
            _log.info("%s is compiled for its sizes alone: %s: %s", name, type(error).__name__, error)
            with outside_modes():
                args, kwargs = tuple(map(in_numbers, args)), {n: in_numbers(v) for n, v in kwargs.items()}
                by_numbers = _lowering_by_numbers(call) if isinstance(call, partial) else call
            return by_numbers(*args, **kwargs)

    return run


def _lowering_by_numbers(lowered: partial[Any]) -> Callable[..., Any]:
    local: LocalCall = lowered.args[0]
    call = local.call
    args = {name: in_numbers(value) for name, value in call.args.items()}
    call = Call(call.op, args, in_numbers(call.outputs), call.is_position)
    inputs, outputs = in_numbers(local.inputs), in_numbers(local.outputs)
    return partial(lowered.func, LocalCall(call, inputs, outputs, local.coordinate, local.comm))
