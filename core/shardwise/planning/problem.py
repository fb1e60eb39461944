"""The problem of one call: which rows may stand side by side on the mesh dims, and what each choice costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from attrs import frozen

from shardwise.errors import InPlaceError, NoStrategyError, ShardingError
from shardwise.kernel.placements import Placement, Shard, show_all
from shardwise.kernel.reductions import LINEAR
from shardwise.kernel.rule import Row
from shardwise.kernel.schema import OpSchema, PlacementStrategy
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import chunk
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.layout_graph import encode, reduction_of
from shardwise.planning.path import path_cost

__all__ = ["Choice", "Problem", "exhaustive", "no_choice"]

Choice = tuple[int, ...]  # one row index per mesh dim
Obstacle = tuple[str, int]  # see Problem.obstacles
Conflict = tuple[str, int, int, int]  # see Problem.conflict


class Table:
    """Rows in codes (see ``layout_graph``), and which of them exclude each other whatever the tensors are."""

    def __init__(self, rows: tuple[Row, ...], ndims: tuple[int | None, ...]) -> None:
        inputs = []
        for row in rows:
            codes: list[int | None] = []
            for p, ndim in zip(row.inputs, ndims, strict=True):
                # Rows that a plugin wrote by hand may count a dim from the end.
                from_end = isinstance(p, Shard) and p.dim < 0
                codes.append(None if p is None else encode(p) + (ndim or 0) if from_end else encode(p))
            inputs.append(tuple(codes))
        self.inputs = tuple(inputs)
        reductions = [_reductions((*row.inputs, *row.outputs)) for row in rows]
        partial = [(1 << s, other) for s, other in enumerate(reductions) if other]
        #: Per row, the rows that it excludes, as bits: their reductions do not commute on some tensor.
        self.barred = tuple(
            sum(bit for bit, other in partial if one and any(other.get(i, kind) != kind for i, kind in one.items()))
            for one in reductions
        )
        apart = [(1 << s, row) for s, row in enumerate(rows) if row.apart]
        lowered = [(1 << s, row) for s, row in enumerate(rows) if row.lowered] if apart else []
        #: Per row, the rows that it excludes, as bits: one runs a lowering that may ask where shards of the other are.
        self.apart = tuple(
            sum({bit for bit, _ in (lowered if row.apart else ())} | {bit for bit, _ in (apart if row.lowered else ())})
            for row in rows
        )
        #: Whether the legality of a choice depends on sizes.
        self.divides = any(row.divides or row.nonempty for row in rows)


def _reductions(placements: Sequence[Placement | None]) -> dict[int, int]:
    """By the index of a tensor that is partial, a number that reductions share which commute with each other."""
    codes = ((i, encode(p)) for i, p in enumerate(placements) if p is not None)
    return {i: 0 if reduction_of(code) in LINEAR else -code for i, code in codes if code < 0}


@lru_cache(maxsize=512)
def _cached_table(rows: tuple[Row, ...], ndims: tuple[int | None, ...]) -> Table:
    return Table(rows, ndims)


# Without slots: what is computed on demand is then an attribute like any other, which is faster.
@frozen(eq=False, slots=False)
class Problem:
    """The choice of a row per mesh dim, for one call or one list position.

    ``specs`` and ``outputs`` are flat, as ``Row.inputs`` and ``Row.outputs`` are; ``out=`` operands are last in
    ``specs``. ``written`` lists operands that the op writes: they must keep their placements. ``same`` pairs a written
    operand with the output that is the same tensor. ``fixed`` operands must keep their placements, too.
    """

    schema: OpSchema
    rows: tuple[Row, ...]
    specs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorMeta | None, ...]
    written: tuple[int, ...]
    same: tuple[tuple[int, int], ...]
    mesh_shape: tuple[int, ...]
    fixed: tuple[int, ...] = ()

    @cached_property
    def table(self) -> Table:
        """The rows in codes."""
        return _cached_table(self.rows, tuple(None if s is None else s.ndim for s in self.specs))

    @property
    def operand_names(self) -> tuple[str, ...]:
        """A name per operand; for a position of zipped lists, the names of the lists."""
        names = self.schema.operand_names
        if len(names) == len(self.specs) and self.schema.specs == self.specs:
            return names
        return tuple(a.name for a in self.schema.signature.tensor_args)

    @property
    def call_specs(self) -> tuple[TensorSpec | None, ...]:
        """The specs of the operands as the call has them."""
        return self.specs

    def as_in_call(self, operand: int, placement: Placement | None) -> Placement | None:  # noqa: ARG002
        """A placement of an operand in a row, as one of the tensor that the call has."""
        return placement

    @cached_property
    def sources(self) -> tuple[tuple[int, ...] | None, ...]:
        """The layout of each operand, in codes."""
        return tuple(None if s is None else tuple(map(encode, s.placements)) for s in self.specs)

    def candidates(self, mesh_dim: int) -> list[int]:
        """Indices of the rows without an obstacle, in the rule's order; if there are none, the deferring rows.

        Raises :class:`InPlaceError` or :class:`NoStrategyError` when there are none of either.
        """
        obstacles = self.obstacles(mesh_dim)
        free = [r for r, obstacle in enumerate(obstacles) if obstacle is None]
        rows = free or [r for r, obstacle in enumerate(obstacles) if obstacle is not None and obstacle[0] == "deferred"]
        if rows:
            return rows
        if self.written:
            written = ", ".join(f"{self.operand_names[i]} = {self.call_specs[i]}" for i in self.written)
            raise InPlaceError(
                asked=f"run {self.schema}",
                found=f"no row keeps what the op writes where it is on mesh dim {mesh_dim} ({written}); "
                f"rows: {'; '.join(map(str, self.rows))}",
                do="Redistribute the written tensor first, or use the op's out-of-place form.",
                op=op_name(self.schema.op),
                mesh_dim=mesh_dim,
            )
        raise NoStrategyError(
            asked=f"run {self.schema}",
            found="its rule has no row for this call",
            do="Redistribute the operands to Replicate(), or extend the rule.",
            op=op_name(self.schema.op),
        )

    def obstacles(self, mesh_dim: int) -> list[Obstacle | None]:
        """Per row, its obstacle on a mesh dim and the operand in question; ``None`` if it has none.

        - ``moves``: an operand that must keep its placements would be redistributed.
        - ``changes``: a written operand would have another placement afterwards.
        - ``deferred``: a shard would become partial. That moves nothing now and more later, and fills memory with zeros
          meanwhile. Such rows are used only where there are no others.
        """
        here = [None if source is None else source[mesh_dim] for source in self.sources]
        unmoved = [i for i in (*self.written, *self.fixed) if here[i] is not None]
        sharded = [i for i, code in enumerate(here) if code is not None and code > 0]
        return [self._obstacle(row, here, unmoved, sharded) for row in range(len(self.rows))]

    def keeps_written(self, row: int) -> bool:
        """Whether a written operand has the placement afterwards that it has in a row."""
        return all(self.rows[row].inputs[i] == self.rows[row].outputs[o] for i, o in self.same)

    def _obstacle(
        self, row: int, here: Sequence[int | None], unmoved: Sequence[int], sharded: Sequence[int]
    ) -> Obstacle | None:
        codes = self.table.inputs[row]
        for i in unmoved:
            if codes[i] != here[i]:
                return "moves", i
        if self.same and not self.keeps_written(row):
            return "changes", next(i for i, o in self.same if self.rows[row].inputs[i] != self.rows[row].outputs[o])
        for i in sharded:
            if (code := codes[i]) is not None and code < 0:
                return "deferred", i
        return None

    def conflict(self, choice: Choice) -> Conflict | None:
        """Why the rows of a choice, or of a prefix of one, exclude each other; ``None`` if they do not.

        All rows but the last are known not to. The reasons are ``("reductions", 0, 0, 0)`` where reductions on several
        mesh dims do not commute, ``("apart", 0, 0, 0)`` where a lowering may ask where strided shards start,
        ``("divides", operand, dim, n)`` where the number of pieces of a dim does not divide ``n``, and
        ``("nonempty", operand, dim, 0)`` where a rank would hold nothing of a dim. A longer choice with an illegal
        prefix is illegal.
        """
        barred, apart = self.table.barred[choice[-1]], self.table.apart[choice[-1]]
        if barred and any(barred >> r & 1 for r in choice):
            return "reductions", 0, 0, 0
        if apart and any(apart >> r & 1 for r in choice):
            return "apart", 0, 0, 0
        if not self.table.divides:
            return None
        # The last mesh dim may split a dim further that the row of an earlier one restricts.
        for r in dict.fromkeys(choice):
            for i, d, n in self.rows[r].divides:
                if not self.divides(choice, i, d, n):
                    return "divides", i, d, n
            for i, d in self.rows[r].nonempty:
                if not self.nonempty(choice, i, d):
                    return "nonempty", i, d, 0
        return None

    def splits(self, choice: Choice, operand: int, dim: int) -> list[int]:
        """Sizes of the mesh dims that split a dim of an operand, in mesh order."""
        return [self.mesh_shape[m] for m, r in enumerate(choice) if self.table.inputs[r][operand] == dim + 1]

    def divides(self, choice: Choice, operand: int, dim: int, size: int) -> bool:
        """Whether the number of pieces into which a choice splits a dim of an operand divides ``size``."""
        shards = 1
        for n in self.splits(choice, operand, dim):
            shards *= n
        return size % shards == 0

    def nonempty(self, choice: Choice, operand: int, dim: int) -> bool:
        """Whether every rank holds something of a dim of an operand under a choice."""
        spec = self.specs[operand]
        sizes = {1 if spec is None else spec.shape[dim]}
        for n in self.splits(choice, operand, dim):
            sizes = {chunk(size, n, i)[0] for size in sizes for i in range(n)}
        return 0 not in sizes

    def target(self, choice: Choice, operand: int) -> tuple[Placement, ...]:
        """The placements of an operand under a choice for the whole mesh."""
        return tuple([p for r in choice if (p := self.rows[r].inputs[operand]) is not None])

    def strategy(self, choice: Choice, costs: Sequence[float] | None = None) -> PlacementStrategy:
        """The strategy of a choice: specs of all inputs and outputs, and the cost of each redistribution in seconds.

        ``costs`` are used as they are; without them each redistribution is searched.
        """
        mesh = self.schema.mesh
        targets = [None if s is None else self.target(choice, i) for i, s in enumerate(self.specs)]
        inputs = self.specs
        if targets != [None if s is None else s.placements for s in self.specs]:
            inputs = tuple(
                [
                    s if s is None or target is None or target == s.placements else s.with_placements(target)
                    for s, target in zip(self.specs, targets, strict=True)
                ]
            )
        outputs = []
        for o, meta in enumerate(self.outputs):
            placements = tuple(p for r in choice if (p := self.rows[r].outputs[o]) is not None)
            outputs.append(None if meta is None else TensorSpec(mesh, placements, meta))
        if costs is None:
            costs = [
                0.0 if src is None or dst is None else path_cost(src, dst)
                for src, dst in zip(self.specs, inputs, strict=True)
            ]
        names = _shared_tuple(tuple(self.rows[r].name for r in choice))
        seconds = tuple(costs) if any(costs) else _shared_tuple((0.0,) * len(costs))
        lowered = any(self.rows[r].lowered for r in choice)
        return PlacementStrategy(inputs, tuple(outputs), seconds, names, lowered)


@lru_cache(maxsize=1024)
def _shared_tuple(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """One tuple for all equal ones: strategies stay in memory with their plans, and many have the same figures."""
    return values


def exhaustive(problem: Problem) -> Iterator[tuple[Choice, PlacementStrategy]]:
    """Every legal choice for the whole mesh, in the order of the rows. For tools and tests: planning never calls it."""
    per_dim = [problem.candidates(m) for m in range(len(problem.mesh_shape))]
    for choice in product(*per_dim):
        if all(problem.conflict(choice[: n + 1]) is None for n in range(len(choice))):
            yield choice, problem.strategy(choice)


def no_choice(problem: Problem) -> ShardingError:
    """The error for a call for which no combination of rows is legal."""
    return NoStrategyError(
        asked=f"run {problem.schema}",
        found="no combination of its rule's rows over the mesh dims is legal: "
        + "; ".join(f"{row.name} {show_all(row.inputs)}" for row in problem.rows),
        do="Redistribute the operands to Replicate() on the mesh dims in question.",
        op=op_name(problem.schema.op),
    )
