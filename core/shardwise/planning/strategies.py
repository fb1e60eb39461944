"""The planner: it states the problem of one call and has it solved. Tools ask it for strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwise.errors import ListLengthError, NoStrategyError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.authored import authored, refuse_answer
from shardwise.kernel.placements import Placement
from shardwise.kernel.plurals import counted
from shardwise.kernel.registry import Registry
from shardwise.kernel.rule import AnyRule, FullMeshRule, Row, Rule, by_type
from shardwise.kernel.schema import OpSchema, OpStrategy, OutputSharding, PlacementStrategy, TupleStrategy
from shardwise.kernel.signature import Call, Kind, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.chooser import best
from shardwise.planning.in_factors import in_factors
from shardwise.planning.path import path_cost
from shardwise.planning.problem import Choice, Problem, exhaustive
from shardwise.planning.results import schema_metas

__all__ = [
    "cheapest",
    "listed",
    "choose",
    "make_call",
    "problems",
    "propagate",
    "result_metas",
    "rows",
    "stated",
    "strategies",
    "strategy",
]

# -- stating the problem -----------------------------------------------------------------------------------------


def make_call(rule: AnyRule, schema: OpSchema, outputs: Sequence[TensorMeta | None]) -> Call:
    """The call as its rule sees it: metas in place of specs, :class:`ByType` for arguments that are keyed by type."""
    arguments = by_type(rule, schema.values, schema.op)
    call = Call(schema.op, {name: _metas(value) for name, value in arguments.items()}, tuple(outputs))
    if rule.results is None:
        return call
    with authored(call.op, rule.source, "results="):
        results = tuple(rule.results(call, schema.mesh.device_type))
    if len(results) != len(outputs) or not all(m is None or isinstance(m, TensorMeta) for m in results):
        answer = f"({', '.join(map(kind_of, results))}) for {counted(len(outputs), 'result')}"
        refuse_answer(
            call.op, rule.source, "results=", answer, "Return a TensorMeta per tensor result, None without one"
        )
    return Call(call.op, call.args, results)


def _metas(value: object) -> object:
    if isinstance(value, TensorSpec):
        return value.tensor_meta
    if isinstance(value, tuple) and any(isinstance(v, TensorSpec) for v in value):
        return tuple(_metas(v) for v in value)
    return value


def problems(rule: Rule, schema: OpSchema, call: Call) -> list[Problem]:
    """One problem per independent choice: one, or one per list position of a ``zip_lists`` rule.

    Where strided shards play a part, it is the problem in factors (:func:`in_factors`).
    """
    return list(map(in_factors, stated(rule, schema, call)))


def stated(rule: Rule, schema: OpSchema, call: Call) -> list[Problem]:
    """:func:`problems` with all rows of the rule, and the dims as they are."""
    if not rule.zip_lists:
        return [_problem(schema, rule.rows(call), schema.specs, call.outputs, schema.written, schema.fixed)]
    check_lengths(schema)
    known: dict[object, Problem] = {}
    per_position = []
    for i in range(call.length):
        indices = _flat_position(schema, i)
        specs = tuple(None if j is None else schema.specs[j] for j in indices)
        part = call.position(i)
        key = (specs, part.outputs)
        if key not in known:
            written, fixed = (
                tuple(k for k, j in enumerate(indices) if j in flat) for flat in (schema.written, schema.fixed)
            )
            known[key] = _problem(schema, rule.rows(part), specs, part.outputs, written, fixed)
        per_position.append(known[key])
    return per_position


def _problem(
    schema: OpSchema,
    rows: tuple[Row, ...],
    specs: Sequence[TensorSpec | None],
    outputs: Sequence[TensorMeta | None],
    written: Sequence[int],
    fixed: Sequence[int],
) -> Problem:
    same: tuple[tuple[int, int], ...] = ()
    if written:  # in-place and ``out=`` ops return operands that they write
        starts, results = schema.starts, [r for r in schema.signature.results if r.is_tensor]
        same = tuple(
            (starts[r.alias], o)
            for o, r in enumerate(results)
            if r.alias is not None and r.written and not r.is_list and starts[r.alias] in written
        )
    mesh_shape = tuple(schema.mesh.shape)
    return Problem(schema, rows, tuple(specs), tuple(outputs), tuple(written), same, mesh_shape, tuple(fixed))


def check_lengths(schema: OpSchema) -> None:
    """Raise :class:`ListLengthError` unless the zipped lists of a call have one length, or are empty."""
    lengths = {
        a.name: len(v)
        for a, v in zip(schema.signature.args, schema.values, strict=True)
        if a.kind is Kind.TENSORS and v
    }
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{name}: {n}" for name, n in lengths.items())
        raise ListLengthError(
            asked=f"run {op_name(schema.op)}",
            found=f"its tensor lists have unequal lengths ({listing})",
            do="Pass lists of one length; an optional list may be empty.",
            op=op_name(schema.op),
            lengths=lengths,
        )


def _flat_position(schema: OpSchema, i: int) -> list[int | None]:
    """Flat operand indices of one list position. All positions share an operand that is not a list."""
    indices: list[int | None] = []
    for arg, value, start in zip(schema.signature.args, schema.values, schema.starts, strict=True):
        if arg.kind is Kind.TENSOR:
            indices.append(start)
        elif arg.kind is Kind.TENSORS:
            indices.append(start + i if value else None)
    return indices


# -- solving it --------------------------------------------------------------------------------------------------


def choose(problem: Problem) -> tuple[Choice, PlacementStrategy]:
    """The cheapest legal choice; :mod:`shardwise.planning.chooser` says which of equals. Raises
    :class:`NoStrategyError`, or :class:`InPlaceError`, which is one.
    """
    choice, costs = best(problem)
    return choice, problem.strategy(choice, costs)


def listed(rule: FullMeshRule, schema: OpSchema) -> OpStrategy:
    """The strategies of a rule that lists them itself. It sees ``Shard(d)`` where an operand has a strided shard."""
    specs = [None if spec is None else spec.without_strides() for spec in schema.specs]
    with authored(schema.op, rule.source, "function"):
        answer = rule.strategies(schema.mesh, schema.with_specs(specs))
    if not isinstance(answer, OpStrategy):
        do = "Return an OpStrategy with a PlacementStrategy per legal choice"
        refuse_answer(schema.op, rule.source, "function", kind_of(answer), do)
    for one in answer.strategies:
        if len(one.input_specs) != len(specs):
            found = (
                f"a strategy with {counted(len(one.input_specs), 'input spec')} for {counted(len(specs), 'operand')}"
            )
            refuse_answer(schema.op, rule.source, "function", found, "Give a spec per operand, None for an absent one")
    return answer


def cheapest(rule: AnyRule, schema: OpSchema, call: Call) -> list[PlacementStrategy]:
    """The cheapest strategy of a call; one per list position for a ``zip_lists`` rule.

    Raises :class:`NoStrategyError` where no strategy is legal.
    """
    if not isinstance(rule, FullMeshRule):
        solved: dict[int, PlacementStrategy] = {}
        per_position = []
        for problem in problems(rule, schema, call):
            if id(problem) not in solved:
                solved[id(problem)] = choose(problem)[1]
            per_position.append(solved[id(problem)])
        return per_position
    enumerated = listed(rule, schema)
    legal = [s for s in enumerated.strategies if all(_stays(s.input_specs[i], schema.specs[i]) for i in schema.written)]
    if not legal:
        raise NoStrategyError(
            asked=f"run {schema}",
            found=f"its rule gives {counted(len(enumerated.strategies), 'strategy')} and none is legal here",
            do="Redistribute the operands, or extend the rule.",
            op=op_name(schema.op),
        )
    return [min(legal, key=lambda s: s.cost)]


def _stays(after: TensorSpec | None, before: TensorSpec | None) -> bool:
    """Whether an operand keeps its layout."""
    return after is before or (after is not None and before is not None and after.untagged is before.untagged)


# -- what tools ask ----------------------------------------------------------------------------------------------


def strategies(rule: AnyRule, schema: OpSchema, outputs: Sequence[TensorMeta | None]) -> OpStrategy | TupleStrategy:
    """Every legal strategy of a call with its cost, cheapest first (a :class:`TupleStrategy` for zipped lists)."""
    if isinstance(rule, FullMeshRule):
        return OpStrategy(tuple(sorted(listed(rule, schema).strategies, key=lambda s: s.cost)))
    call = make_call(rule, schema, outputs)
    per_position = []
    for problem in problems(rule, schema, call):
        ranked = sorted(exhaustive(problem), key=lambda pair: (pair[1].cost, pair[0]))
        per_position.append(OpStrategy(tuple(strategy for _, strategy in ranked)))
    return TupleStrategy(tuple(per_position)) if rule.zip_lists else per_position[0]


def propagate(rule: AnyRule, schema: OpSchema, outputs: Sequence[TensorMeta | None]) -> OutputSharding:
    """The output specs of a call, and the schema to which its inputs must be redistributed first, if any."""
    inputs, results = merged(schema, cheapest(rule, schema, make_call(rule, schema, outputs)))
    output_spec = results[0] if len(results) == 1 else tuple(results) or None
    is_redistributed = tuple(inputs) != schema.specs
    return OutputSharding(output_spec, schema.with_specs(inputs) if is_redistributed else None)


def merged(
    schema: OpSchema, chosen: Sequence[PlacementStrategy]
) -> tuple[Sequence[TensorSpec | None], Sequence[TensorSpec | None]]:
    """Flat input and output specs of a call, from its strategy or from those of its list positions."""
    if not chosen:
        return schema.specs, ()
    zipped = len(chosen) != 1 or len(chosen[0].input_specs) != len(schema.specs)
    if not zipped:
        return chosen[0].input_specs, chosen[0].output_specs
    inputs = list(schema.specs)
    for i, strategy in enumerate(chosen):
        for j, spec in zip(_flat_position(schema, i), strategy.input_specs, strict=True):
            if j is not None and spec is not None:
                inputs[j] = spec
    lists = len(chosen[0].output_specs) if chosen else 0
    return inputs, [s.output_specs[k] for k in range(lists) for s in chosen]


Places = Sequence[Placement] | None


def result_metas(schema: OpSchema, instead: Callable[..., Any] | None = None) -> tuple[TensorMeta | None, ...]:
    """Metas of the tensor results of a call, lists flattened, ``None`` for one that is undefined.

    ``instead`` runs on the meta device in place of the op, as a rule's ``meta=`` does.

    Raises :class:`NoStrategyError` when the shapes depend on data, and what the op itself raises for a wrong call.
    """
    metas = schema_metas(schema, instead)
    if metas is None:
        raise NoStrategyError(
            asked=f"enumerate the strategies of {schema}",
            found="the shape of its result depends on data",
            do="Run the op on data.",
            op=op_name(schema.op),
        )
    return metas


def rows(rule: Rule, schema: OpSchema) -> tuple[Row, ...]:
    """The legal rows of one call, in order of preference. The placements of its operands play no part."""
    return rule.rows(make_call(rule, schema, result_metas(schema, rule.meta)))


def strategy(
    schema: OpSchema,
    inputs: Sequence[Places],
    outputs: Sequence[Places],
    metas: Sequence[TensorMeta | None],
    *,
    lowered: bool = False,
) -> PlacementStrategy:
    """The strategy with these placements, one per mesh dim for each operand and result (flat, ``None`` where absent).

    ``metas`` are those of :func:`result_metas`. The costs are those of redistributing each operand of ``schema`` to
    these placements. Raises :class:`PlacementError` for a placement that a tensor cannot have.
    """
    targets = tuple(
        None if spec is None or places is None else spec.with_placements(places)
        for spec, places in zip(schema.specs, inputs, strict=True)
    )
    results = tuple(
        None if meta is None or places is None else TensorSpec(schema.mesh, tuple(places), meta)
        for meta, places in zip(metas, outputs, strict=True)
    )
    costs = tuple(
        0.0 if src is None or dst is None else path_cost(src, dst)
        for src, dst in zip(schema.specs, targets, strict=True)
    )
    return PlacementStrategy(targets, results, costs, (), lowered)


# -- by the rule that is in force ------------------------------------------------------------------------------------


def strategies_of(registry: Registry, schema: OpSchema) -> OpStrategy | TupleStrategy:
    """:func:`strategies` by the rule in force."""
    rule = registry.lookup(schema.op).rule
    return strategies(rule, schema, result_metas(schema, rule.meta))


def propagated(registry: Registry, schema: OpSchema) -> OutputSharding:
    """:func:`propagate` by the rule in force."""
    rule = registry.lookup(schema.op).rule
    return propagate(rule, schema, result_metas(schema, rule.meta))
