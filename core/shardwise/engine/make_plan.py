"""From a described call to its plan: choose the strategy and prepare it for this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from attrs import frozen

from shardwise.comm.agreement import agree_on_generator
from shardwise.comm.mesh_comm import MeshComm
from shardwise.comm.policy import in_force as policies
from shardwise.comm.redistribute import runner
from shardwise.engine.decided import decided, in_force, resting, result_moves, tagged, then_moved
from shardwise.engine.kernel_dtypes import refuse_dtypes, refuse_shared_places
from shardwise.engine.local_arguments import local_statics
from shardwise.engine.moved_writes import moved_writes, writing_back
from shardwise.engine.sends import move_of, sends_of, together
from shardwise.engine.shared_moves import Move, operand_move
from shardwise.engine.view_copies import writable
from shardwise.errors import InPlaceError, NoStrategyError
from shardwise.kernel.local_strides import alias
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.precedence import Entry
from shardwise.kernel.rule import AnyRule, runs_other_code
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.kernel.signature import Call, Kind, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.kernel.view_copies import fresh, fresh_operand
from shardwise.planning.strategies import cheapest, make_call, merged
from shardwise.private_torch.ops import direct_call
from shardwise.rule.lowering import LocalCall

__all__ = ["DescribedCall", "check_written", "is_joined", "make_plan"]

Runner = Callable[[torch.Tensor], torch.Tensor]
Choose = Callable[[AnyRule, OpSchema, Call], list[PlacementStrategy]]


@frozen
class DescribedCall:
    """One call as its rule sees it, before a strategy is chosen.

    ``metas`` are those of the results. They are all None if a shape depends on data; then ``is_known`` is false.
    """

    entry: Entry
    schema: OpSchema
    call: Call
    metas: tuple[TensorMeta | None, ...]
    is_known: bool

    @classmethod
    def of(cls, entry: Entry, schema: OpSchema, outputs: tuple[TensorMeta | None, ...] | None) -> DescribedCall:
        """From a schema and the result of :func:`shardwise.planning.results.output_metas`."""
        metas = (None,) * sum(r.is_tensor for r in schema.signature.results) if outputs is None else outputs
        return cls(entry, schema, make_call(entry.rule, schema, metas), metas, outputs is not None)

    def check(self, inputs: Sequence[TensorSpec | None]) -> None:
        """Raise :class:`NoStrategyError` for results of unknown shape unless every operand is whole. ``inputs`` are the
        specs after redistribution.
        """
        if not self.is_known and not all(s is None or s.is_replicated for s in inputs):
            raise NoStrategyError(
                asked=f"run {self.schema}",
                found="the shape of its result depends on data, and its rule shards an operand",
                do="Give such an op only the row in which every operand is whole. Where the shape does follow from the "
                "arguments, the op lacks a fake that says so: torch.library.register_fake.",
                op=op_name(self.schema.op),
            )


def make_plan(described: DescribedCall, choose: Choose = cheapest) -> Plan:
    """The plan of a call. An illegal call raises before anything is communicated.

    Where no row writes a tensor as it lies, the op runs on it reduced, or whole: see :func:`moved_writes`.
    Raises :class:`NoStrategyError`, :class:`InPlaceError`, or :class:`RuleArgumentError` for a fault of the rule.
    """
    try:
        return _plan(described, choose)
    except NoStrategyError:
        metas = described.metas if described.is_known else None
        for schema in moved_writes(described.schema):
            with suppress(NoStrategyError):
                return writing_back(described.schema, _plan(DescribedCall.of(described.entry, schema, metas), choose))
        raise


def _plan(described: DescribedCall, choose: Choose) -> Plan:
    entry, schema, call = described.entry, described.schema, described.call
    refuse_dtypes(schema, lowers=runs_other_code(entry.rule))
    refuse_shared_places(schema)
    # Before a strategy: a rule says where the result lies in every operand that is written, whatever its shape.
    check_written(schema, described.metas)
    decision = decided(entry.rule, schema, call) if choose is cheapest else None
    chosen = choose(entry.rule, schema, call) if decision is None else [decision[0]]
    targets, results = merged(schema, chosen)
    # An operand that is not redistributed keeps its own spec, which may be marked as a copy.
    inputs = [
        src if src is not None and dst is not None and src.placements == dst.placements else dst
        for src, dst in zip(schema.specs, targets, strict=True)
    ]
    lowering = entry.rule.lowering if any(s.lowered for s in chosen) else None
    results = tagged(entry.rule, schema, _marked_copies(schema, inputs, results, lowering is not None))
    described.check(inputs)
    if schema.signature.draws:
        agree_on_generator(schema.mesh)
    local = None
    if entry.rule.lowering is not None or entry.rule.local_args is not None:
        first = next(s for s in schema.specs if s is not None)
        operands = tuple(inputs[: len(call.operands)])
        local = LocalCall(call, operands, tuple(results), first.coordinate(), MeshComm(first.mesh))
    static = local_statics(entry, schema, local)
    run: Callable[..., Any] = direct_call(schema.op) if lowering is None else partial(lowering, local)
    if any(r.reseats for r in schema.signature.results):
        run = partial(_on_alias, run)
    after, made = None, results
    if decision is not None and decision[1].moves_results:
        results = resting(results, decision[1])
        run, after = then_moved(run, made, results), result_moves(made, results)
    full = lowering is not None or static is not None
    # A view of an operand that was moved has its memory. What was decided for a whole step sends what was foreseen.
    is_shared = decision is None and all(r.alias is None or r.written for r in schema.signature.results)
    redistributes = _redistributes(schema, inputs, is_shared=is_shared)
    plan = Plan(schema, entry, chosen, redistributes, static, run, full, tuple(results))
    plan.after = after
    if policies.is_on:
        is_explicit = decision is not None and in_force.is_written
        sends = sends_of(
            described, inputs, made, is_lowered=lowering is not None, is_shared=is_shared, is_explicit=is_explicit
        )
        pairs = zip(made, results, strict=True)
        ends = [
            move_of("its result", a, b, is_of_result=True)
            for a, b in pairs
            if a is not None and b is not None and a is not b
        ]
        plan.sends = together([sends], schema, ends, is_explicit=is_explicit) if any(ends) else sends
    return plan


def _on_alias(run: Callable[..., Any], local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run an op that makes a tensor another view of itself, on an alias: the local tensor itself stays as it is."""
    return run(alias(local), *args, **kwargs)


def _redistributes(schema: OpSchema, inputs: Sequence[TensorSpec | None], *, is_shared: bool) -> tuple[Any, ...] | None:
    """:attr:`Plan.redistributes` of a call whose operands are redistributed to ``inputs``."""
    moves = [
        None if src is None or dst is None else _move(schema, i, src, dst, is_shared)
        for i, (src, dst) in enumerate(zip(schema.specs, inputs, strict=True))
    ]
    if not any(moves):
        return None
    flat = iter(moves)
    redistributes: list[Any] = []
    for arg, value in zip(schema.signature.args, schema.values, strict=True):
        if arg.kind is Kind.TENSOR:
            redistributes.append(next(flat))
        elif arg.kind is Kind.TENSORS:
            pairs = [(i, move) for i in range(len(value or ())) if (move := next(flat)) is not None]
            redistributes.append(pairs or None)
    return tuple(redistributes)


def _move(schema: OpSchema, i: int, src: TensorSpec, dst: TensorSpec, is_shared: bool) -> Move | None:
    """How an operand gets to the layout that the op needs; a copy of a view is brought up to date first."""
    if not src.is_copy:
        return None if src is dst else operand_move(src, dst, is_shared=is_shared)
    if i not in schema.written:
        if src is dst:
            return fresh_operand
        run = runner(src, dst)
        return lambda local, _tensor: run(fresh(local))
    first = writable(schema.op)
    if src is dst:
        return lambda local, _tensor: first(local)
    run = runner(src, dst)
    return lambda local, _tensor: run(first(local))


def _marked_copies(
    schema: OpSchema, inputs: Sequence[TensorSpec | None], results: Sequence[TensorSpec | None], lowered: bool
) -> Sequence[TensorSpec | None]:
    """Mark the results of a view op whose operand is redistributed or is such a copy: a write to them would be lost.

    A lowering redistributes its operand, too, if the operand is sharded or partial and the result is whole.
    """
    declared = [r for r in schema.signature.results if r.is_tensor]
    if all(r.alias is None or r.written for r in declared):
        return results
    specs = list(results)
    start = 0
    for result in declared:
        end = start + (len(results) - len(declared) + 1 if result.is_list else 1)
        if result.alias is not None and not result.written:
            source = schema.starts[result.alias]
            before = schema.specs[source]
            is_moved = before is not inputs[source] or (lowered and is_joined(before, results[start:end]))
            if is_moved or (before is not None and before.is_copy):
                specs[start:end] = [None if s is None else s.as_copy() for s in specs[start:end]]
        start = end
    return specs


def is_joined(before: TensorSpec | None, results: Sequence[TensorSpec | None]) -> bool:
    """Whether some mesh dim shards or reduces an operand and leaves a result whole: then no result is a view."""
    return before is not None and any(
        p != REPLICATE and q == REPLICATE
        for spec in results
        if spec is not None
        for p, q in zip(before.placements, spec.placements, strict=True)
    )


def check_written(schema: OpSchema, metas: Sequence[TensorMeta | None]) -> None:
    """Raise :class:`InPlaceError` when the op changes the global shape of an operand."""
    tensor_results = [r for r in schema.signature.results if r.is_tensor]
    for result, meta in zip(tensor_results, metas, strict=False):
        if result.written and result.alias is not None and not result.is_list:
            before = schema.specs[schema.starts[result.alias]]
            if before is not None and meta is not None and before.shape != meta.shape:
                raise InPlaceError(
                    asked=f"run {op_name(schema.op)} on {before}",
                    found=f"it would change the shape of the tensor in place, to {tuple(meta.shape)}",
                    do="Use the out-of-place form, or pass an empty tensor as out=.",
                    op=op_name(schema.op),
                )
