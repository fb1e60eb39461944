"""The problem of a call with strided shards: the same problem for tensors whose dims are factors.

There every strided shard is a plain one (see :mod:`shardwise.kernel.factors`), so rows, bounds and paths need to know
nothing of them. Which factors a dim has comes from the placements of the operands and from rows with strided shards, as
views have. A row that passes a dim along passes its factors along: then the results have them, too, and each factor has
a row of its own. ``"m k, k n -> m n"`` with ``m`` of the factors ``(b, s)`` has the rows ``b``, ``s``, ``k`` and ``n``.
A row that runs a lowering passes the outermost factor alone, unless the function does not ask where shards start; nor
does it run beside a row with inner factors of a dim of which it may ask that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from attrs import evolve, field, frozen

from shardwise.kernel.factors import Factors, flat_placements
from shardwise.kernel.placements import Placement, Shard, shard, shard_dim, split_factor
from shardwise.kernel.rule import Row
from shardwise.kernel.schema import PlacementStrategy
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import is_same, is_symbolic, unique
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.problem import Choice, Problem

__all__ = ["FactoredProblem", "factored", "in_factors"]

#: A dim of one tensor: ``"in"`` or ``"out"``, the index of the operand or result, the dim.
Place = tuple[str, int, int]


@frozen(eq=False, slots=False)
class FactoredProblem(Problem):
    """A problem whose tensors have factors for dims, and the problem that it stands for."""

    stands_for: Problem = field(kw_only=True)
    operand_factors: tuple[Factors | None, ...] = field(kw_only=True)
    result_factors: tuple[Factors | None, ...] = field(kw_only=True)

    @property
    def operand_names(self) -> tuple[str, ...]:
        return self.stands_for.operand_names

    @property
    def call_specs(self) -> tuple[TensorSpec | None, ...]:
        return self.stands_for.specs

    def as_in_call(self, operand: int, placement: Placement | None) -> Placement | None:
        factors = self.operand_factors[operand]
        return placement if placement is None or factors is None else flat_placements([placement], [1], factors)[0]

    def strategy(self, choice: Choice, costs: Sequence[float] | None = None) -> PlacementStrategy:
        strategy = super().strategy(choice, costs)
        mesh_shape, schema = self.mesh_shape, self.schema
        inputs = [
            spec
            if spec is None or mine is None or factors is None or own is mine
            else spec.with_placements(flat_placements(mine.placements, mesh_shape, factors))
            for spec, factors, own, mine in zip(
                self.stands_for.specs, self.operand_factors, self.specs, strategy.input_specs, strict=True
            )
        ]
        outputs = [
            None
            if meta is None or mine is None or factors is None
            else TensorSpec(schema.mesh, flat_placements(mine.placements, mesh_shape, factors), meta)
            for meta, factors, mine in zip(
                self.stands_for.outputs, self.result_factors, strategy.output_specs, strict=True
            )
        ]
        return evolve(strategy, input_specs=tuple(inputs), output_specs=tuple(outputs))


def in_factors(problem: Problem) -> Problem:
    """The problem for tensors whose dims are factors, where strided shards play a part; else the problem itself.

    A row with strided shards plays none unless an operand is sharded on one of its dims: it is there to leave a shard
    where it is, and from a whole or partial operand no step leads to it that does not lead on more cheaply.
    """
    rows = [row for row in problem.rows if not row.is_strided or _is_near(row, problem.specs)]
    strided = any(spec is not None and spec.is_strided for spec in problem.specs)
    if not strided and not any(row.is_strided for row in rows):
        return problem if len(rows) == len(problem.rows) else evolve(problem, rows=tuple(rows))
    return factored(evolve(problem, rows=tuple(rows)))


def _is_near(row: Row, specs: Sequence[TensorSpec | None]) -> bool:
    return any(
        spec is not None and (dim := shard_dim(p)) is not None and bool(spec.dim_map[dim])
        for p, spec in zip(row.inputs, specs, strict=True)
    )


def factored(problem: Problem, more: Sequence[tuple[Place, int]] = ()) -> FactoredProblem:
    """:func:`in_factors` of a problem with strided shards; ``more`` are borders between factors in dims of operands."""
    borders = _Borders(problem, more)
    operand_factors, result_factors = borders.factors("in"), borders.factors("out")
    specs = tuple(
        None if spec is None or factors is None else spec.unflattened(factors)
        for spec, factors in zip(problem.specs, operand_factors, strict=True)
    )
    outputs = tuple(
        None if meta is None or factors is None else _unflattened(meta, factors)
        for meta, factors in zip(problem.outputs, result_factors, strict=True)
    )
    return FactoredProblem(
        problem.schema,
        tuple(unique([new for row in problem.rows for new in borders.rows(row)])),
        specs,
        outputs,
        problem.written,
        problem.same,
        problem.mesh_shape,
        problem.fixed,
        stands_for=problem,
        operand_factors=operand_factors,
        result_factors=result_factors,
    )


def _unflattened(meta: TensorMeta, factors: Factors) -> TensorMeta:
    shape: list[Any] = []
    stride: list[Any] = []
    for sizes, step in zip(factors, meta.stride, strict=True):
        shape += sizes
        stride += [step * math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    return TensorMeta(shape, stride, meta.dtype)


@frozen
class _Entry:
    """Where the dim of a row is in one tensor: in which dim, and behind how many pieces of factors in front of it."""

    place: Place
    outer: int


class _Borders:
    """Where the factors of each dim meet: the products of the sizes up to there, 1 among them."""

    def __init__(self, problem: Problem, more: Sequence[tuple[Place, int]]) -> None:
        self._problem = problem
        self._of: dict[Place, set[int]] = {}
        for i, spec in enumerate(problem.specs):
            for d, sizes in enumerate(() if spec is None else spec.factors):
                self._of["in", i, d] = {math.prod(sizes[:k]) for k in range(len(sizes))}
        for o, meta in enumerate(problem.outputs):
            for d in range(0 if meta is None else meta.ndim):
                self._of["out", o, d] = {1}
        # What is written in place is one tensor.
        for i, o in problem.same:
            for d in range(problem.specs[i].ndim):  # type: ignore[union-attr]
                self._of["out", o, d] = self._of["in", i, d]
        for place, border in more:
            self._add(place, border)
        spread = True
        while spread:
            spread = False
            for row in problem.rows:
                spread |= self._spread(row)

    # -- tensors --

    def _tensor(self, side: str, i: int) -> TensorSpec | TensorMeta | None:
        return self._problem.specs[i] if side == "in" else self._problem.outputs[i]

    def _shape(self, place: Place) -> Sequence[Any]:
        tensor = self._tensor(*place[:2])
        assert tensor is not None
        return tensor.shape

    def _sizes(self, place: Place) -> tuple[Any, ...]:
        """The factors of a dim."""
        total, borders = self._shape(place)[place[2]], sorted(self._of[place])
        return (*(b // a for a, b in pairwise(borders)), total // borders[-1])

    def factors(self, side: str) -> tuple[Factors | None, ...]:
        tensors: Sequence[Any] = self._problem.specs if side == "in" else self._problem.outputs
        return tuple(
            None if t is None else tuple(self._sizes((side, i, d)) for d in range(len(t.shape)))
            for i, t in enumerate(tensors)
        )

    def _add(self, place: Place, border: int) -> bool:
        """Make a border; False where it is there, crosses others, or the operand's layout crosses it."""
        of, total = self._of[place], self._shape(place)[place[2]]
        if border in of or any(max(border, b) % min(border, b) for b in of) or total % border:
            return False
        of.add(border)
        side, i, d = place
        operands = [i] if side == "in" else [k for k, o in self._problem.same if o == i]
        for k in operands:
            spec = self._problem.specs[k]
            sizes = tuple(self._sizes(("in", k, e)) if e == d else spec.factors[e] for e in range(spec.ndim))  # type: ignore[union-attr]
            if spec is not None and spec.in_factors(sizes) is None:
                of.discard(border)
                return False
        return True

    # -- rows --

    def _entries(self, row: Row) -> list[_Entry]:
        """The row's dim in each tensor that has it."""
        listed = [
            *(("in", i, p) for i, p in enumerate(row.inputs)),
            *(("out", o, p) for o, p in enumerate(row.outputs)),
        ]
        return [
            _Entry((side, i, dim % len(self._shape((side, i, 0)))), split_factor(p))
            for side, i, p in listed
            if p is not None and (dim := shard_dim(p)) is not None and self._tensor(side, i) is not None
        ]

    def _size(self, row: Row, entries: Sequence[_Entry]) -> Any:
        """The size of the row's dim; ``None`` where the tensors do not agree on it."""
        if row.divides:
            return row.divides[0][2]
        size, *others = (self._shape(e.place)[e.place[2]] for e in entries)
        return size if all(is_same(size, other) for other in others) else None

    def _inside(self, entry: _Entry, size: Any) -> list[int]:
        """The borders of a dim that lie inside the row's dim, counted from its start, which is 1."""
        inside = sorted(b // entry.outer for b in self._of[entry.place] if b >= entry.outer and not b % entry.outer)
        return [b for b in inside if size % b == 0 and (b == 1 or size != b)]

    def _spread(self, row: Row) -> bool:
        """Bring the borders inside the row's dim to every tensor that has it; whether any is new."""
        entries = self._entries(row)
        if (
            (row.lowered and not row.scattered)
            or not entries
            or (size := self._size(row, entries)) is None
            or is_symbolic((size,))
        ):
            return False
        inside = sorted({b for e in entries for b in self._inside(e, size)} | {1})
        new = [(e.place, e.outer * b) for e in entries for b in inside]
        new += [(e.place, e.outer * size) for e in entries if self._shape(e.place)[e.place[2]] != e.outer * size]
        return sum(self._add(*border) for border in new) > 0

    def rows(self, row: Row) -> Iterator[Row]:
        """The rows of the factors of a row's dim; the row itself where it has none."""
        entries = self._entries(row)
        if not entries:
            yield row
            return
        size = self._size(row, entries)
        is_whole = size is not None and all(self._has(e, size) for e in entries)
        if not is_whole and row.is_strided:
            return  # the layout of an operand crosses the dim
        inside = [self._inside(e, size) for e in entries] if is_whole else [[1]]
        passes = row.scattered or not row.lowered
        count = len(inside[0]) if passes and all(b == inside[0] for b in inside) else 1
        for k in range(count):
            yield self._row(row, entries, k, count, () if is_whole and count > 1 else row.divides)

    def _has(self, entry: _Entry, size: Any) -> bool:
        """Whether the row's dim is made of factors of the tensor's dim."""
        borders, end = self._of[entry.place], entry.outer * size
        ends = (self._shape(entry.place)[entry.place[2]], *borders)
        return entry.outer in borders and any(is_same(end, border) for border in ends)

    def _row(
        self, row: Row, entries: Sequence[_Entry], k: int, count: int, also: Sequence[tuple[int, int, Any]]
    ) -> Row:
        """The row that shards factor ``k`` of the row's dim; ``also`` is what the number of pieces must divide."""
        at: dict[Place, int] = {}
        divides: list[tuple[int, int, Any]] = []
        sizes: list[Any] = []
        for e in entries:
            side, i, d = e.place
            own = sorted(self._of[e.place]).index(e.outer) + k
            at[e.place] = sum(len(self._sizes((side, i, c))) for c in range(d)) + own
            factors = self._sizes(e.place)
            if own + 1 < len(factors) or (row.divides and not row.is_strided and count > 1):
                sizes.append(factors[own])

        def in_dims(side: str, placements: Sequence[Placement | None]) -> tuple[Placement | None, ...]:
            placements_in_dims = []
            for i, p in enumerate(placements):
                d = shard_dim(p)
                if d is not None and self._tensor(side, i) is not None:
                    p = shard(at[side, i, d % len(self._shape((side, i, 0)))])  # noqa: PLW2901
                placements_in_dims.append(p)
            return tuple(placements_in_dims)

        inputs = in_dims("in", row.inputs)
        first = next((i, p.dim) for i, p in enumerate(inputs) if isinstance(p, Shard))
        divides += [(*first, n) for n in unique(sizes)]
        if not row.is_strided:
            divides += [(i, at["in", i, d % len(self._shape(("in", i, 0)))], n) for i, d, n in also]
        nonempty = tuple((i, at["in", i, d]) for i, d in row.nonempty)
        name = row.name if count == 1 else f"{row.name}, factor {k + 1} of {count}"
        inner = row.is_strided or k > 0
        outputs = in_dims("out", row.outputs)
        return Row(
            inputs, outputs, name, row.lowered, tuple(divides), nonempty, row.scattered, inner and not row.scattered
        )
