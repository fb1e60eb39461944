"""The cases of one call on one mesh: combinations of rows over the mesh dims, and the specs that they need."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod

from attrs import evolve, frozen

from shardwise.errors import NoStrategyError
from shardwise.kernel.placements import REPLICATE, Partial, Placement, shard
from shardwise.kernel.placements import partial as partial_of
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import AnyRule, FullMeshRule, Row, Rule
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.kernel.signature import Call, signature
from shardwise.kernel.spec import AbstractMesh, TensorSpec
from shardwise.planning.problem import Choice, Problem
from shardwise.planning.strategies import merged, problems
from shardwise.testing.partials import can_be_partial
from shardwise.testing.trial import Case

__all__ = ["Listed", "Option", "list_cases"]

Specs = tuple[tuple[TensorSpec | None, ...], tuple[TensorSpec | None, ...]]


@frozen(eq=False)
class Option:
    """A case that may be run: the names of its rows, and how to make it. Cheap, so that many can be chosen from."""

    rows: tuple[str, ...]
    case: Callable[[], Case]


@frozen(eq=False)
class Listed:
    """The cases that may be run, the names of all rows of the call, and how many cases do not apply to it."""

    options: tuple[Option, ...]
    rows: tuple[str, ...]
    left: int


def list_cases(
    rule: AnyRule, schema: OpSchema, call: Call, mesh: AbstractMesh, rng: random.Random, most: int
) -> Listed:
    """Each row alone on a 1-D mesh; on other meshes combinations of rows: all of them up to ``most``, else those with
    the same row on every mesh dim and as many at random. Raises what the rule raises.
    """
    if isinstance(rule, FullMeshRule):
        return _full_mesh_cases(rule, _starts(schema, mesh, rng, most), mesh)
    # A written operand keeps its placements, whichever they are: every row is tried as if the operand had them already.
    parts = [evolve(p, written=()) for p in problems(rule, schema, call)]
    for part in parts:
        _check_rows(part)
    tried = [_combinations(part, rng, most) for part in parts]
    legal = [[c for c in choices if _legal(part, c)] for part, choices in zip(parts, tried, strict=True)]
    return Listed(
        tuple(_options(parts, legal, schema, mesh)),
        tuple(dict.fromkeys(_row_name(row) for part in parts for row in part.rows if _holds(rule, part, row))),
        sum(map(len, tried)) - sum(map(len, legal)),
    )


def _holds(rule: Rule, part: Problem, row: Row) -> bool:
    """Whether this form of the op can take the row.

    An in-place form cannot where what it writes would lie elsewhere afterwards: the row is for the other forms that the
    rule names. Where a rule names no other form, the row is of no use, and is counted.
    """
    if all(row.inputs[i] == row.outputs[o] for i, o in part.same):
        return True
    return all(any(arg.written for arg in signature(op).args) for op in rule.ops)


def _full_mesh_cases(rule: FullMeshRule, starts: Sequence[OpSchema], mesh: AbstractMesh) -> Listed:
    """The function's strategies for several placements of the operands, on which they may depend. For the first it must
    return some.
    """
    found: dict[Specs, Case] = {}
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
            if moved or not all(_all_can_lie(spec) for spec in s.input_specs):
                continue
            case = Case(s.input_specs, s.output_specs, s.names or (str(s),), s.lowered, mesh)
            found.setdefault((s.input_specs, s.output_specs), case)
    options = tuple(Option(case.rows, partial(_given, case)) for case in found.values())
    return Listed(options, tuple(dict.fromkeys(name for option in options for name in option.rows)), left)


def _given(case: Case) -> Case:
    return case


def _all_can_lie(spec: TensorSpec | None) -> bool:
    return spec is None or all(_can_lie(spec, p) for p in spec.placements)


def _starts(schema: OpSchema, mesh: AbstractMesh, rng: random.Random, most: int) -> list[OpSchema]:
    """The call with its operands in different places: all whole first, then all ways, or as many as ``most`` at
    random.
    """
    ways = [[None] if spec is None else _layouts(spec, mesh.ndim) for spec in schema.specs]
    if prod(map(len, ways)) <= most:
        found = list(product(*ways))
    else:
        found = [tuple(rng.choice(layouts) for layouts in ways) for _ in range(most)]
    unique = dict.fromkeys([schema.specs, *found])
    return [schema.with_specs(specs) for specs in unique]


def _layouts(spec: TensorSpec, mesh_ndim: int) -> list[TensorSpec | None]:
    """Every layout of a tensor whose reductions are alike."""
    kinds = [p for kind in REDUCE_OPS if _can_lie(spec, p := partial_of(kind))]
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
        per_dim = [[r for r in problem.candidates(m) if _fits(problem, r)] for m in range(len(problem.mesh_shape))]
    except NoStrategyError:
        return []
    if len(per_dim) == 1 or prod(map(len, per_dim)) <= most:
        return list(product(*per_dim))
    equal = [(r,) * len(per_dim) for r in per_dim[0]]
    mixed = [tuple(rng.choice(rows) for rows in per_dim) for _ in range(most)]
    return list(dict.fromkeys([*equal, *mixed]))


def _fits(problem: Problem, row: int) -> bool:
    return all(_can_lie(spec, p) for spec, p in zip(problem.specs, problem.rows[row].inputs, strict=True))


def _can_lie(spec: TensorSpec | None, placement: Placement | None) -> bool:
    """Whether a tensor of this dtype can be partial in the way that is asked of it, if any is."""
    return spec is None or not isinstance(placement, Partial) or can_be_partial(placement.reduce_op, spec.dtype)


def _legal(problem: Problem, choice: Choice) -> bool:
    return all(problem.conflict(choice[: n + 1]) is None for n in range(len(choice)))


def _options(
    parts: Sequence[Problem], legal: Sequence[Sequence[Choice]], schema: OpSchema, mesh: AbstractMesh
) -> list[Option]:
    if not all(legal):
        return []
    found = []
    for k in range(max(map(len, legal), default=1)):
        # Positions of zipped lists choose independently of each other: shift the choices against each other.
        choices = [options[(k + 3 * i) % len(options)] for i, options in enumerate(legal)]
        names = [tuple(_row_name(part.rows[r]) for r in choice) for part, choice in zip(parts, choices, strict=True)]
        # One name per mesh dim; for zipped lists the different rows of all positions.
        rows = names[0] if len(names) == 1 else tuple(dict.fromkeys(name for several in names for name in several))
        found.append(Option(rows, partial(_case, rows, parts, choices, schema, mesh)))
    return found


# -- specs -------------------------------------------------------------------------------------------------------


def _case(
    rows: tuple[str, ...], parts: Sequence[Problem], choices: Sequence[Choice], schema: OpSchema, mesh: AbstractMesh
) -> Case:
    chosen = [_strategy(part, choice, mesh) for part, choice in zip(parts, choices, strict=True)]
    inputs, outputs = merged(schema, chosen)
    return Case(tuple(inputs), tuple(outputs), rows, any(s.lowered for s in chosen), mesh)


def _strategy(problem: Problem, choice: Choice, mesh: AbstractMesh) -> PlacementStrategy:
    """A choice written out, without costs."""
    rows = [problem.rows[r] for r in choice]
    inputs = tuple(
        None if spec is None else spec.with_placements(problem.target(choice, i))
        for i, spec in enumerate(problem.specs)
    )
    outputs = tuple(
        None if meta is None else TensorSpec(mesh, tuple(p for r in rows if (p := r.outputs[o]) is not None), meta)
        for o, meta in enumerate(problem.outputs)
    )
    return PlacementStrategy(inputs, outputs, (), tuple(map(_row_name, rows)), any(row.lowered for row in rows))


def _check_rows(problem: Problem) -> None:
    for row in problem.rows:
        for what, placed, metas in (("operand", row.inputs, problem.specs), ("result", row.outputs, problem.outputs)):
            if len(placed) != len(metas):
                raise NoStrategyError(
                    asked=f"read the row {row}",
                    found=f"it has {len(placed)} {what}s and the call has {len(metas)}",
                    do="Give one placement per tensor operand (out= last) and result.",
                )


def _row_name(row: Row) -> str:
    return row.name or str(row)
