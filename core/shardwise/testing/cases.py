"""The cases of one call on one mesh: which rows go together on the mesh dims, and the specs that they ask for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from math import prod

from attrs import evolve, frozen

from shardwise.errors import NoStrategyError
from shardwise.flow import Row
from shardwise.placements import Partial
from shardwise.planner import merged, problems
from shardwise.rule import AnyRule, FullMeshRule
from shardwise.schema import OpSchema, PlacementStrategy
from shardwise.signature import Call
from shardwise.spec import AbstractMesh, TensorSpec
from shardwise.strategy import Choice, Problem
from shardwise.testing.pending import can_be_pending
from shardwise.testing.trial import Case

__all__ = ["Listed", "list_cases"]

# Up to here all combinations of rows over the mesh dims are tried; beyond, the equal ones and as many at random.
_ALL_COMBINATIONS = 49


@frozen
class Listed:
    """The cases that can be run, the names of all rows, and how many cases do not apply to the call."""

    cases: tuple[Case, ...]
    rows: tuple[str, ...]
    left: int


def list_cases(rule: AnyRule, schema: OpSchema, call: Call, mesh: AbstractMesh, rng: random.Random) -> Listed:
    """Every row by itself on a 1-D mesh, combinations of rows on others. Raises what the rule raises."""
    if isinstance(rule, FullMeshRule):
        strategies = rule.strategies(mesh, schema).strategies
        cases = [Case(s.input_specs, s.output_specs, s.names or (str(s),), s.lowered, mesh) for s in strategies]
        return _listed(cases, [name for case in cases for name in case.rows], 0)
    # What the op writes stays where it is, wherever that may be: every row that keeps it somewhere is tried.
    parts = [evolve(p, written=()) for p in problems(rule, schema, call)]
    for part in parts:
        _check_rows(part)
    names = [_row_name(row) for part in parts for row in part.rows]
    tried = [_tried(part, rng) for part in parts]
    legal = [[c for c in choices if _legal(part, c)] for part, choices in zip(parts, tried, strict=True)]
    left = sum(map(len, tried)) - sum(map(len, legal))
    return _listed(_row_cases(parts, legal, schema, mesh), names, left)


def _listed(cases: Sequence[Case], names: Sequence[str], left: int) -> Listed:
    possible = tuple(case for case in cases if _possible(case))
    return Listed(possible, tuple(dict.fromkeys(names)), left + len(cases) - len(possible))


def _possible(case: Case) -> bool:
    """Whether tensors of these dtypes can be pending as the case wants its operands."""
    return all(
        can_be_pending(p.reduce_op, spec.dtype)
        for spec in case.inputs
        if spec is not None
        for p in spec.placements
        if isinstance(p, Partial)
    )


def _row_cases(
    parts: Sequence[Problem], legal: Sequence[Sequence[Choice]], schema: OpSchema, mesh: AbstractMesh
) -> list[Case]:
    if not all(legal):
        return []
    found = []
    for k in range(max(map(len, legal), default=1)):
        # Positions of zipped lists choose independently of each other: shift the choices against each other.
        at = [choices[(k + 3 * i) % len(choices)] for i, choices in enumerate(legal)]
        chosen = [_strategy(part, choice, mesh) for part, choice in zip(parts, at, strict=True)]
        inputs, outputs = merged(schema, chosen)
        lowered = any(s.lowered for s in chosen)
        found.append(Case(tuple(inputs), tuple(outputs), _names(chosen), lowered, mesh))
    return found


def _tried(problem: Problem, rng: random.Random) -> list[Choice]:
    """Combinations of rows over the mesh dims: all, or the equal ones and some at random."""
    try:
        per_dim = [problem.candidates(m) for m in range(len(problem.mesh_shape))]
    except NoStrategyError:
        return []
    if len(per_dim) == 1 or prod(map(len, per_dim)) <= _ALL_COMBINATIONS:
        return list(product(*per_dim))
    equal = [(r,) * len(per_dim) for r in per_dim[0]]
    mixed = [tuple(rng.choice(rows) for rows in per_dim) for _ in range(_ALL_COMBINATIONS)]
    return list(dict.fromkeys([*equal, *mixed]))


def _legal(problem: Problem, choice: Choice) -> bool:
    return all(problem.allowed(choice[: n + 1]) for n in range(len(choice)))


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


def _names(chosen: Sequence[PlacementStrategy]) -> tuple[str, ...]:
    """The row of each mesh dim; of zipped lists, the different rows of all positions."""
    if len(chosen) == 1:
        return chosen[0].names
    return tuple(dict.fromkeys(name for strategy in chosen for name in strategy.names))
