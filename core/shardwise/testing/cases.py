"""The cases of one call on one mesh: combinations of rows over the mesh dims, with the specs of all tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod

from attrs import evolve, frozen

from shardwise.errors import NoStrategyError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, Partial, Placement, shard
from shardwise.kernel.placements import partial as partial_of
from shardwise.kernel.plurals import counted
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import AnyRule, FullMeshRule, Row, Rule
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Call, signature
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.in_factors import factored, in_factors
from shardwise.planning.problem import Choice, Problem
from shardwise.planning.strategies import merged, stated
from shardwise.testing.partials import can_be_partial
from shardwise.testing.trial import Case

__all__ = ["Listed", "Option", "list_cases"]

Specs = tuple[tuple[TensorSpec | None, ...], tuple[TensorSpec | None, ...]]


@frozen(eq=False)
class Option:
    """A case that may be run: the names of its rows, and a function that builds it. It is cheap; a case is not."""

    rows: tuple[str, ...]
    case: Callable[[], Case]


@frozen(eq=False)
class Listed:
    """The cases that may be run, the names of all rows of the call, and how many cases do not apply to it."""

    options: tuple[Option, ...]
    rows: tuple[str, ...]
    left: int


def list_cases(
    rule: AnyRule,
    schema: OpSchema,
    call: Call,
    mesh: AbstractMesh,
    rng: random.Random,
    most: int,
    *,
    strided: bool = False,
) -> Listed:
    """The cases of a call: on a 1-D mesh each row alone, on other meshes combinations of rows.

    With ``strided``, these are the cases with strided shards: every dim whose size is a product is also split inside.

    These are all combinations if there are at most ``most`` of them. If there are more, they are those with one row on
    every mesh dim, and ``most`` others at random. Raises whatever the rule raises.
    """
    if isinstance(rule, FullMeshRule):
        # The call with its operands in different layouts: first whole, then in all layouts, or in ``most`` random ones.
        layouts = [[None] if spec is None else _layouts(spec, mesh.ndim) for spec in schema.specs]
        if prod(map(len, layouts)) <= most:
            combinations = list(product(*layouts))
        else:
            combinations = [tuple(rng.choice(of_operand) for of_operand in layouts) for _ in range(most)]
        unique = dict.fromkeys([schema.specs, *combinations])
        return _full_mesh_cases(rule, [schema.with_specs(specs) for specs in unique], mesh)
    # A written operand keeps its placements. So every row is tried as if the operand had the row's placements already.
    every = [evolve(p, written=()) for p in stated(rule, schema, call)]
    parts = [factored(p, _inner_borders(p)) if strided else in_factors(p) for p in every]
    for part in parts:
        for row in part.rows:
            for what, entries, metas in (("operand", row.inputs, part.specs), ("result", row.outputs, part.outputs)):
                if len(entries) != len(metas):
                    raise NoStrategyError(
                        asked=f"read the row {row}",
                        found=f"it has {counted(len(entries), what)} and the call has {len(metas)}",
                        do="Give one placement per tensor operand (out= last) and result.",
                    )
    tried = [_combinations(part, rng, most) for part in parts]
    legal = [
        [c for c in choices if all(part.conflict(c[: n + 1]) is None for n in range(len(c)))]
        for part, choices in zip(parts, tried, strict=True)
    ]
    if strided:
        legal = [[c for c in choices if _is_inside(part, c)] for part, choices in zip(parts, legal, strict=True)]
    return Listed(
        tuple(_options(parts, legal, schema, mesh)),
        tuple(dict.fromkeys(_row_name(row) for part in parts for row in part.rows if _holds(rule, part, row))),
        sum(map(len, tried)) - sum(map(len, legal)),
    )


def _inner_borders(problem: Problem) -> list[tuple[tuple[str, int, int], int]]:
    """A border in every dim of an operand whose size is a product: behind its least factor."""
    return [
        (("in", i, d), least)
        for i, spec in enumerate(problem.specs)
        for d, n in enumerate(() if spec is None else spec.shape)
        if (least := next((f for f in range(2, n) if n % f == 0), None)) is not None
    ]


def _is_inside(problem: Problem, choice: Choice) -> bool:
    """Whether a choice gives some tensor a strided shard."""
    strategy = problem.strategy(choice, (0.0,) * len(problem.specs))
    return any(spec is not None and spec.is_strided for spec in (*strategy.input_specs, *strategy.output_specs))


def _holds(rule: Rule, part: Problem, row: Row) -> bool:
    """Whether this form of the op can take the row.

    An in-place form cannot if its written operand would get other placements. Such a row is for other forms of the op,
    which the rule names, too. If the rule names only in-place forms, the row is of no use, and counts as one to try.
    """
    if all(row.inputs[i] == row.outputs[o] for i, o in part.same):
        return True
    return all(any(arg.written for arg in signature(op).args) for op in rule.ops)


def _full_mesh_cases(rule: FullMeshRule, starts: Sequence[OpSchema], mesh: AbstractMesh) -> Listed:
    """The strategies that the rule's function returns for several layouts of the operands.

    It must return some for the first layout, in which all are whole.
    """
    cases: dict[Specs, Case] = {}
    left = 0
    for start in starts:
        try:
            answer = rule.strategies(mesh, start).strategies
        except NoStrategyError:
            if start is starts[0]:
                raise
            left += 1
            continue
        for s in answer:
            moved = any(s.input_specs[i] is not start.specs[i] for i in start.written)
            if moved or not all(_can_have(spec, p) for spec in s.input_specs if spec for p in spec.placements):
                continue
            case = Case(s.input_specs, s.output_specs, s.names or (str(s),), s.lowered, mesh)
            cases.setdefault((s.input_specs, s.output_specs), case)
    options = tuple(Option(case.rows, lambda case=case: case) for case in cases.values())  # type: ignore[misc]
    return Listed(options, tuple(dict.fromkeys(name for option in options for name in option.rows)), left)


def _layouts(spec: TensorSpec, mesh_ndim: int) -> list[TensorSpec | None]:
    """Every layout of a tensor with at most one kind of reduction."""
    kinds = [p for kind in REDUCE_OPS if _can_have(spec, p := partial_of(kind))]
    single = [REPLICATE, *map(shard, range(spec.ndim)), *kinds]
    return [
        spec.with_placements(placements)
        for placements in product(single, repeat=mesh_ndim)
        if len({p for p in placements if isinstance(p, Partial)}) <= 1
    ]


# -- combinations ------------------------------------------------------------------------------------------------


def _combinations(problem: Problem, rng: random.Random, most: int) -> list[Choice]:
    """One row index per mesh dim, of the rows that this call's operands can take."""
    try:
        per_dim = [problem.candidates(m) for m in range(len(problem.mesh_shape))]
    except NoStrategyError:
        return []
    fitting = {
        r
        for r, row in enumerate(problem.rows)
        if all(_can_have(spec, p) for spec, p in zip(problem.specs, row.inputs, strict=True))
    }
    per_dim = [[r for r in rows if r in fitting] for rows in per_dim]
    if len(per_dim) == 1 or prod(map(len, per_dim)) <= most:
        return list(product(*per_dim))
    equal = [(r,) * len(per_dim) for r in per_dim[0]]
    mixed = [tuple(rng.choice(rows) for rows in per_dim) for _ in range(most)]
    return list(dict.fromkeys([*equal, *mixed]))


def _can_have(spec: TensorSpec | None, placement: Placement | None) -> bool:
    """Whether a tensor can have a placement: not every dtype has every reduction."""
    return spec is None or not isinstance(placement, Partial) or can_be_partial(placement.reduce_op, spec.dtype)


def _options(
    parts: Sequence[Problem], legal: Sequence[Sequence[Choice]], schema: OpSchema, mesh: AbstractMesh
) -> list[Option]:
    if not all(legal):
        return []
    cases = []
    for k in range(max(map(len, legal), default=1)):
        # Positions of zipped lists choose independently, so each position starts its choices at another one.
        choices = [options[(k + 3 * i) % len(options)] for i, options in enumerate(legal)]
        names = [tuple(_row_name(part.rows[r]) for r in choice) for part, choice in zip(parts, choices, strict=True)]
        # One name per mesh dim. For zipped lists: the names of all rows of all positions, each once.
        rows = names[0] if len(names) == 1 else tuple(dict.fromkeys(name for several in names for name in several))
        cases.append(Option(rows, partial(_build_case, rows, parts, choices, schema, mesh)))
    return cases


# -- specs -------------------------------------------------------------------------------------------------------


def _build_case(
    names: tuple[str, ...], parts: Sequence[Problem], choices: Sequence[Choice], schema: OpSchema, mesh: AbstractMesh
) -> Case:
    strategies = []
    for problem, choice in zip(parts, choices, strict=True):
        strategy = problem.strategy(choice, (0.0,) * len(problem.specs))
        strategies.append(evolve(strategy, names=tuple(_row_name(problem.rows[r]) for r in choice)))
    all_inputs, all_outputs = merged(schema, strategies)
    return Case(tuple(all_inputs), tuple(all_outputs), names, any(s.lowered for s in strategies), mesh)


def _row_name(row: Row) -> str:
    return row.name or str(row)
