"""From the rows of one mesh dim to strategies of the whole mesh: which rows go together, and what each choice costs."""

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
from shardwise.kernel.spec import TensorMeta, TensorSpec
from shardwise.kernel.symbols import chunk
from shardwise.planning.layout_graph import encode, reduction_of
from shardwise.planning.path import path_cost

__all__ = ["Choice", "Problem", "exhaustive", "no_choice"]

Choice = tuple[int, ...]  # one row index per mesh dim
Obstacle = tuple[str, int]  # see Problem.obstacles
Conflict = tuple[str, int, int, int]  # see Problem.conflict


class Table:
    """Rows in codes (see ``layout_graph``), and which of them go together whatever the tensors are."""

    def __init__(self, rows: tuple[Row, ...], ndims: tuple[int | None, ...]) -> None:
        self.inputs = tuple(_codes(row.inputs, ndims) for row in rows)
        kinds = [[-1 if p is None else _class(encode(p)) for p in (*row.inputs, *row.outputs)] for row in rows]
        #: Per row, the rows that it cannot go with, as bits: their reductions do not commute on some tensor.
        self.barred = tuple(
            sum(
                1 << s
                for s, other in enumerate(kinds)
                if any(a != b for a, b in zip(one, other, strict=True) if a >= 0 <= b)
            )
            for one in kinds
        )
        #: Whether a choice depends on how the rows divide sizes, too.
        self.divides = any(row.divides or row.nonempty for row in rows)


def _codes(placements: Sequence[Placement | None], ndims: Sequence[int | None]) -> tuple[int | None, ...]:
    found: list[int | None] = []
    for p, ndim in zip(placements, ndims, strict=True):
        if p is None:
            found.append(None)
            continue
        # Rows that a plugin wrote by hand may count a dim from the end.
        from_end = isinstance(p, Shard) and p.dim < 0
        found.append(encode(p) + (ndim or 0) if from_end else encode(p))
    return tuple(found)


def _class(code: int) -> int:
    """Reductions of one number commute; -1 for what is not partial."""
    if code >= 0:
        return -1
    return 0 if reduction_of(code) in LINEAR else -code


@lru_cache(maxsize=512)
def _table(rows: tuple[Row, ...], ndims: tuple[int | None, ...]) -> Table:
    return Table(rows, ndims)


@frozen(eq=False)
class Problem:
    """The choice to be made for one call (or one list position): its rows, where its operands lie, what they write.

    ``specs`` are flat with ``out=`` last, as ``Row.inputs`` are. ``written`` lists operands that must stay where they
    are. ``same`` pairs a written operand with the output that it is. ``fixed`` operands stay too.
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
        return _table(self.rows, tuple(None if s is None else s.ndim for s in self.specs))

    @property
    def operand_names(self) -> tuple[str, ...]:
        """A name per operand; at a position of zipped lists, those of the lists."""
        names = self.schema.operand_names
        if len(names) == len(self.specs) and self.schema.specs == self.specs:
            return names
        return tuple(a.name for a in self.schema.signature.tensor_args)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...] | None, ...]:
        """Where each operand lies, in codes."""
        return tuple(None if s is None else tuple(map(encode, s.placements)) for s in self.specs)

    def candidates(self, mesh_dim: int) -> list[int]:
        """Indices of the rows that respect what the op writes, in the rule's order; raises when there is none."""
        obstacles = self.obstacles(mesh_dim)
        free = [r for r, obstacle in enumerate(obstacles) if obstacle is None]
        if free:
            return free
        deferring = [r for r, obstacle in enumerate(obstacles) if obstacle is not None and obstacle[0] == "deferred"]
        if not deferring:
            raise self._refusal(mesh_dim)
        return deferring

    def obstacles(self, mesh_dim: int) -> list[Obstacle | None]:
        """Per row, what speaks against it on a mesh dim, with the operand in question; ``None`` for nothing.

        ``moves``: an operand that must stay would be redistributed. ``changes``: a written operand would be another
        placement afterwards. ``deferred``: a shard would become partial, which moves nothing now and more later, and
        fills memory with zeros meanwhile; such rows are taken where there are no others.
        """
        here = [None if source is None else source[mesh_dim] for source in self.sources]
        stays = [i for i in (*self.written, *self.fixed) if here[i] is not None]
        sharded = [i for i, code in enumerate(here) if code is not None and code > 0]
        return [self._obstacle(row, here, stays, sharded) for row in range(len(self.rows))]

    def _obstacle(
        self, row: int, here: Sequence[int | None], stays: Sequence[int], sharded: Sequence[int]
    ) -> Obstacle | None:
        wanted = self.table.inputs[row]
        for i in stays:
            if wanted[i] != here[i]:
                return "moves", i
        for i, o in self.same:
            if self.rows[row].inputs[i] != self.rows[row].outputs[o]:
                return "changes", i
        for i in sharded:
            if (code := wanted[i]) is not None and code < 0:
                return "deferred", i
        return None

    def _refusal(self, mesh_dim: int) -> ShardingError:
        names = self.operand_names
        if self.written:
            stays = ", ".join(f"{names[i]} = {self.specs[i]}" for i in self.written)
            rows = "; ".join(map(str, self.rows))
            return InPlaceError(
                asked=f"run {self.schema}",
                found=f"no row keeps what the op writes where it is on mesh dim {mesh_dim} ({stays}); rows: {rows}",
                do="Redistribute the written tensor first, or use the op's out-of-place form.",
                op=op_name(self.schema.op),
                mesh_dim=mesh_dim,
            )
        return NoStrategyError(
            asked=f"run {self.schema}",
            found="its rule has no row for this call",
            do="Redistribute the operands to Replicate(), or extend the rule.",
            op=op_name(self.schema.op),
        )

    def conflict(self, choice: Choice) -> Conflict | None:
        """Why the rows of a choice (a prefix of the mesh dims) do not go together; ``None`` if they do.

        All rows but the last are known to go together. Reductions on several mesh dims must commute, and a dim must
        be split as its rows want: ``("divides", operand, dim, n)`` where the number of pieces does not divide ``n``,
        and ``("nonempty", operand, dim, 0)`` where a rank would hold nothing. A refused prefix stays refused.
        """
        barred = self.table.barred[choice[-1]]
        if barred and any(barred >> r & 1 for r in choice):
            return "reductions", 0, 0, 0
        if not self.table.divides:
            return None
        # A later mesh dim may split a dim further that an earlier row wants divided evenly.
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
        """Whether the pieces into which a choice splits a dim of an operand number a divisor of ``size``."""
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
        """Where an operand must lie under a choice for the whole mesh."""
        return tuple(p for r in choice if (p := self.rows[r].inputs[operand]) is not None)

    def strategy(self, choice: Choice, costs: Sequence[float] | None = None) -> PlacementStrategy:
        """A choice written out: specs of all inputs and outputs, and the cost of each redistribution, if not given."""
        mesh = self.schema.mesh
        inputs = tuple(None if s is None else self._placed(s, self.target(choice, i)) for i, s in enumerate(self.specs))
        if inputs == self.specs:
            inputs = self.specs
        outputs = tuple(
            None if meta is None else TensorSpec(mesh, _output(self.rows, choice, o), meta)
            for o, meta in enumerate(self.outputs)
        )
        if costs is None:
            costs = [
                0.0 if src is None or dst is None else path_cost(src, dst)
                for src, dst in zip(self.specs, inputs, strict=True)
            ]
        names = _shared(tuple(self.rows[r].name for r in choice))
        found = tuple(costs) if any(costs) else _shared((0.0,) * len(costs))
        return PlacementStrategy(inputs, outputs, found, names, any(self.rows[r].lowered for r in choice))

    @staticmethod
    def _placed(spec: TensorSpec, target: tuple[Placement, ...]) -> TensorSpec:
        return spec if target == spec.placements else spec.with_placements(target)


@lru_cache(maxsize=1024)
def _shared(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first tuple that was equal: strategies stay in memory with their plans, and most are much alike."""
    return value


def _output(rows: Sequence[Row], choice: Choice, index: int) -> tuple[Placement, ...]:
    return tuple(p for r in choice if (p := rows[r].outputs[index]) is not None)


def exhaustive(problem: Problem) -> Iterator[tuple[Choice, PlacementStrategy]]:
    """Every legal choice for the whole mesh, in the order of the rows. For tools and tests; the planner never does
    this.
    """
    per_dim = [problem.candidates(m) for m in range(len(problem.mesh_shape))]
    for choice in product(*per_dim):
        if all(problem.conflict(choice[: n + 1]) is None for n in range(len(choice))):
            yield choice, problem.strategy(choice)


def no_choice(problem: Problem) -> ShardingError:
    """The error for a call whose rows never go together."""
    return NoStrategyError(
        asked=f"run {problem.schema}",
        found="no combination of its rule's rows over the mesh dims is legal: "
        + "; ".join(f"{row.name} {show_all(row.inputs)}" for row in problem.rows),
        do="Redistribute the operands to Replicate() on the mesh dims in question.",
        op=op_name(problem.schema.op),
    )
