"""The rows that a call of a step may take, strided shards among them.

Rows depend on the sizes of a call and not on layouts, but for strided shards: a row that passes a dim along passes its
factors along, and which factors a dim has comes from the layouts that its operands may have. So calls are gone through
in order, and each says which strided shards its results may have. Layouts here count the factor of a strided shard in
the whole dim, as rows do; :func:`as_placements` gives them as specs have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from shardwise.kernel.factors import flat_placements
from shardwise.kernel.placements import (
    REPLICATE,
    Partial,
    Placement,
    StridedShard,
    is_strided,
    shard_dim,
    split_factor,
    strided_shard,
)
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.in_factors import FactoredProblem, in_factors
from shardwise.planning.problem import Problem
from shardwise.planning.strategies import make_call, stated
from shardwise.program.step_graph import CallNode, Places, StepGraph

__all__ = [
    "Choices",
    "RowTable",
    "as_placements",
    "flat_rows",
    "in_whole",
    "is_whole",
    "placed",
    "rows_that_ran",
    "shards_of",
]


@frozen(eq=False)
class Choices:
    """The rows that a call may take, and which of them on each mesh dim.

    ``problem`` has the first of the rows, those without strided shards. It is None where the recorded strategy is the
    only one: a rule that lists its strategies, or rows that could not be found again. ``lost`` are the rows that ran
    where a plan may not take them.
    """

    problem: Problem | None
    rows: tuple[Row, ...]
    legal: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...] = ()
    _sides: dict[tuple[int, ...], tuple[tuple[Places, ...], tuple[Places, ...]]] = field(factory=dict, init=False)
    _rows_with: dict[Any, list[int] | None] = field(factory=dict, init=False)

    def sides(self, chosen: Sequence[int]) -> tuple[tuple[Places, ...], tuple[Places, ...]]:
        """The layouts of all operands and those of all results, with one row per mesh dim.

        A tensor that is not there counts as whole.
        """
        key = tuple(chosen)
        known = self._sides.get(key)
        if known is None:
            rows = [self.rows[r] for r in key]
            inputs = tuple(tuple(map(placed, side)) for side in zip(*(row.inputs for row in rows), strict=True))
            outputs = tuple(tuple(map(placed, side)) for side in zip(*(row.outputs for row in rows), strict=True))
            known = self._sides[key] = inputs, outputs
        return known

    def rows_with(self, inputs: Sequence[Places | None], outputs: Sequence[Places | None] | None) -> list[int] | None:
        """The first rows with these layouts of operands and results that may stand side by side; None are any."""
        key = inputs, outputs
        if key not in self._rows_with:
            self._rows_with[key] = self._first_with(inputs, outputs)
        found = self._rows_with[key]
        return None if found is None else list(found)

    def _first_with(self, inputs: Sequence[Places | None], outputs: Sequence[Places | None] | None) -> list[int] | None:
        chosen: list[int] = []
        for m, legal in enumerate(self.legal):
            rows = (r for r in legal if _has(self.rows[r].inputs, inputs, m))
            r = next((r for r in rows if outputs is None or _has(self.rows[r].outputs, outputs, m)), None)
            if r is None:
                return None
            chosen.append(r)
        return chosen if self.allows(chosen) else None

    def allows(self, chosen: Sequence[int]) -> bool:
        """Whether rows may stand side by side on the mesh dims."""
        if self.problem is None:
            return True
        choice = tuple(chosen)
        plain = tuple(r for r in choice if r < len(self.problem.rows))
        if len(plain) == len(choice):
            return all(self.problem.conflict(choice[: n + 1]) is None for n in range(len(choice)))
        return self._is_simple(choice)

    def _is_simple(self, choice: Sequence[int]) -> bool:
        """Beside a row with a strided shard: rows that shard other tensors or dims, or the factors outside of it, and
        run no lowering.
        """
        rows = [self.rows[r] for r in choice]
        strided = [row for row in rows if row.is_strided]
        if len(strided) > 1 or any(row.lowered or row.divides for row in rows if row not in strided):
            return len(set(choice)) == 1 and len(choice) == 1
        (one,) = strided
        for row in rows:
            if row is one:
                continue
            pairs = zip((*row.inputs, *row.outputs), (*one.inputs, *one.outputs), strict=True)
            if any(isinstance(q, StridedShard) and shard_dim(p) == q.dim for p, q in pairs):
                return False
        return True


def placed(placement: Placement | None) -> Placement:
    """The placement of a row; one without a placement is of a tensor that is not there."""
    return REPLICATE if placement is None else placement


def _has(side: Sequence[Placement | None], layouts: Sequence[Places | None], m: int) -> bool:
    return all(at is None or placed(p) == at[m] for p, at in zip(side, layouts, strict=True))


@define(eq=False)
class RowTable:
    """The choices of every call of a step."""

    graph: StepGraph
    choices: list[Choices] = field(factory=list, init=False)
    _strided: dict[int, frozenset[Placement]] = field(factory=dict, init=False)
    _known: dict[Any, Choices] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        for call in self.graph.calls:
            choices = self._of(call)
            self.choices.append(choices)
            for k, t in enumerate(call.results):
                made = {p for row in choices.rows if isinstance(p := row.outputs[k], StridedShard)}
                if t is not None and made:
                    self._strided[t] = frozenset(made)

    def _of(self, call: CallNode) -> Choices:
        mesh_shape = tuple(self.graph.mesh.shape)
        ran = rows_that_ran(call, mesh_shape)
        rule = call.entry.rule
        if not isinstance(rule, Rule):
            return _only(ran)
        outs = tuple(None if t is None else self.graph.tensors[t].spec.tensor_meta for t in call.results)
        whole = call.schema.with_specs([None if s is None else _whole(s) for s in call.schema.specs])
        strided = tuple(() if t is None else tuple(sorted(self._strided.get(t, ()), key=str)) for t in call.operands)
        key = (whole.key, outs, tuple((r.inputs, r.outputs) for r in ran), strided)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._stated(rule, whole, outs, ran, strided)
        return known

    def _stated(
        self,
        rule: Rule,
        whole: OpSchema,
        outs: Sequence[TensorMeta | None],
        ran: Sequence[Row],
        strided: Sequence[Sequence[Placement]],
    ) -> Choices:
        mesh_shape = tuple(self.graph.mesh.shape)
        (every,) = stated(rule, whole, make_call(rule, whole, outs))
        every = evolve(every, rows=tuple(_without_absent(row, outs) for row in every.rows))
        problem = evolve(every, rows=tuple(row for row in every.rows if not row.is_strided))
        legal = [
            r
            for r, row in enumerate(problem.rows)
            if _has_only_sums(row) and problem.keeps_written(r) and _keeps_fixed(problem, row)
        ]
        more = list(dict.fromkeys(_strided_rows(every, strided)))
        more = [row for row in more if _keeps_fixed(problem, row) and _has_only_sums(row)]
        rows = (*problem.rows, *more)
        per_dim = []
        for m, row in enumerate(ran):
            at = next((i for i, r in enumerate(rows) if (r.inputs, r.outputs) == (row.inputs, row.outputs)), None)
            if at is None:
                whole_row = next((r for r in legal if is_whole(problem.rows[r])), None)
                if whole_row is None or not any(is_strided((*row.inputs, *row.outputs)) for row in ran):
                    return _only(ran)
                if any(isinstance(row.inputs[i], StridedShard) for row in ran for i in whole.written):
                    return _only(ran)  # what is written stays where it is
                # Strided shards of an operand that a plan may not shard so anew: the call takes another row.
                lost = tuple(len(rows) + m for m in range(len(ran)))
                return Choices(problem, (*rows, *ran), (tuple(legal),) * len(ran), lost)
            fitting = [len(problem.rows) + k for k, r in enumerate(more) if _divides(r, whole.specs, mesh_shape[m])]
            per_dim.append(tuple(sorted({*legal, *fitting, at})))
        return Choices(problem, rows, tuple(per_dim))


def _without_absent(row: Row, outs: Sequence[TensorMeta | None]) -> Row:
    """A row as a strategy that ran has it: results that are not there, such as a gradient that nobody wants, have no
    placement.
    """
    outputs = tuple(None if meta is None else p for p, meta in zip(row.outputs, outs, strict=True))
    return row if outputs == row.outputs else evolve(row, outputs=outputs)


def _strided_rows(every: Problem, strided: Sequence[Sequence[Placement]]) -> Iterator[Row]:
    """The rows with strided shards: those that the rule states, and those that pass on one of an operand."""
    for row in every.rows:
        if row.is_strided and all(not isinstance(p, StridedShard) or p in strided[i] for i, p in enumerate(row.inputs)):
            yield row
    for placement in dict.fromkeys(p for of in strided for p in of):
        specs = tuple(
            spec.with_placements([placement] + [REPLICATE] * (spec.mesh.ndim - 1))
            if spec is not None and placement in of and _fits(spec, placement)
            else spec
            for spec, of in zip(every.specs, strided, strict=True)
        )
        if specs == every.specs:
            continue
        for _, row in flat_rows(in_factors(evolve(every, specs=specs))):
            if is_strided((*row.inputs, *row.outputs)):
                yield row


def _fits(spec: TensorSpec, placement: Placement) -> bool:
    dim = shard_dim(placement)
    return dim is not None and spec.shape[dim] % split_factor(placement) == 0


def flat_rows(problem: Problem) -> Iterator[tuple[int, Row]]:
    """The rows of a problem, with the placements of the tensors that the call has in place of those of factors."""
    for r, row in enumerate(problem.rows):
        if not isinstance(problem, FactoredProblem):
            yield r, row
            continue
        inputs = tuple(problem.as_in_call(i, p) for i, p in enumerate(row.inputs))
        outputs = tuple(
            p if p is None or factors is None else flat_placements([p], [1], factors)[0]
            for p, factors in zip(row.outputs, problem.result_factors, strict=True)
        )
        # What must divide is a factor, whose number is of no use here; the split factors of the row say the same.
        yield r, Row(inputs, outputs, row.name, row.lowered)


def _divides(row: Row, specs: Sequence[TensorSpec | None], n: int) -> bool:
    """Whether a row with strided shards may stand on a mesh dim of ``n`` ranks: pieces of a factor are even."""
    for i, d, size in row.divides:
        if shard_dim(row.inputs[i]) == d and size % n:
            return False
    for p, spec in zip(row.inputs, specs, strict=True):
        if spec is not None and isinstance(p, StridedShard) and spec.shape[p.dim] // split_factor(p) % n:
            return False
    return True


def as_placements(layout: Places, mesh_shape: Sequence[int]) -> Places:
    """A layout as specs have it: a strided shard counts what earlier mesh dims leave of the factors outside of it."""
    if not is_strided(layout):
        return layout
    placements = list(layout)
    for m, p in enumerate(layout):
        if isinstance(p, StridedShard):
            outer = math.prod(
                n
                for q, n in zip(layout[:m], mesh_shape, strict=False)
                if shard_dim(q) == p.dim and split_factor(q) < p.split_factor
            )
            placements[m] = strided_shard(p.dim, int(p.split_factor // outer))
    return tuple(placements)


def in_whole(layout: Places, mesh_shape: Sequence[int]) -> Places:
    """The inverse of :func:`as_placements`."""
    placements = list(layout)
    for m, p in enumerate(layout):
        if isinstance(p, StridedShard):
            outer = math.prod(int(n) for q, n in zip(placements[:m], mesh_shape, strict=False) if shard_dim(q) == p.dim)
            placements[m] = strided_shard(p.dim, int(p.split_factor) * outer)
    return tuple(placements)


def rows_that_ran(call: CallNode, mesh_shape: Sequence[int]) -> list[Row]:
    """The rows of the strategy that ran, by mesh dim."""
    (strategy,) = call.strategies
    inputs, outputs = (
        [None if s is None else in_whole(s.placements, mesh_shape) for s in specs]
        for specs in (strategy.input_specs, strategy.output_specs)
    )
    return [
        Row(
            tuple(None if places is None else places[m] for places in inputs),
            tuple(None if places is None else places[m] for places in outputs),
            lowered=strategy.lowered,
        )
        for m in range(len(mesh_shape))
    ]


def is_whole(row: Row) -> bool:
    """Whether a row has every tensor whole, and runs the op itself."""
    return not row.lowered and all(p is None or p == REPLICATE for p in (*row.inputs, *row.outputs))


def _only(ran: Sequence[Row]) -> Choices:
    return Choices(None, tuple(ran), tuple((m,) for m in range(len(ran))))


def _whole(spec: TensorSpec) -> TensorSpec:
    return spec.untagged.with_placements([REPLICATE] * len(spec.placements))


def _has_only_sums(row: Row) -> bool:
    return all(not isinstance(p, Partial) or p.reduce_op == "sum" for p in (*row.inputs, *row.outputs))


def _keeps_fixed(problem: Problem, row: Row) -> bool:
    return all(row.inputs[i] is None or row.inputs[i] == REPLICATE for i in problem.fixed)


def shards_of(rows: Iterable[Row], mesh_shape: Sequence[int]) -> int:
    """How many ways rows split the work of a call."""
    return math.prod(
        n
        for row, n in zip(rows, mesh_shape, strict=True)
        if any(shard_dim(p) is not None for p in (*row.inputs, *row.outputs))
    )
