"""From the rows of one mesh dim to strategies of the whole mesh: which rows go together, and what each choice costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from attrs import frozen

from shardwise.errors import InPlaceError, NoStrategyError, ShardingError
from shardwise.flow import Row
from shardwise.placements import Partial, Placement, Shard, show_all
from shardwise.schema import OpSchema, PlacementStrategy
from shardwise.signature import op_name
from shardwise.spec import TensorMeta, TensorSpec, chunk
from shardwise.transition import transition_cost

__all__ = ["Problem", "exhaustive"]

Choice = tuple[int, ...]  # one row index per mesh dim
_COMMUTING = {"sum", "avg"}


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

    def candidates(self, mesh_dim: int) -> list[int]:
        """Indices of the rows that respect what the op writes, in the rule's order; raises when there is none."""
        found = [i for i, row in enumerate(self.rows) if self._keeps_written(row, mesh_dim)]
        if not found:
            raise self._refusal(mesh_dim)
        # Turning a shard into a pending tensor moves nothing now and more later, and fills memory with zeros meanwhile.
        return [i for i in found if not self._defers(self.rows[i], mesh_dim)] or found

    def _defers(self, row: Row, mesh_dim: int) -> bool:
        return any(
            spec is not None and isinstance(wanted, Partial) and isinstance(spec.placements[mesh_dim], Shard)
            for spec, wanted in zip(self.specs, row.inputs, strict=True)
        )

    def _keeps_written(self, row: Row, mesh_dim: int) -> bool:
        for i in (*self.written, *self.fixed):
            spec = self.specs[i]
            if spec is not None and row.inputs[i] != spec.placements[mesh_dim]:
                return False
        return all(row.inputs[i] == row.outputs[o] for i, o in self.same)

    def _refusal(self, mesh_dim: int) -> ShardingError:
        names = self.schema.operand_names
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

    def allowed(self, choice: Choice) -> bool:
        """Whether the rows picked so far (a prefix of the mesh dims) go together. A refused prefix stays refused."""
        last = self.rows[choice[-1]]
        return (
            all(self._divides(choice, i, d, n) for i, d, n in last.divides)
            and all(self._nonempty(choice, i, d) for i, d in last.nonempty)
            and self._divides_still(choice)
            and self._pending_fit(choice)
        )

    def _splits(self, choice: Choice, operand: int, dim: int) -> list[int]:
        """Sizes of the mesh dims that split a dim of an operand, in mesh order."""
        return [
            self.mesh_shape[m]
            for m, r in enumerate(choice)
            if isinstance(p := self.rows[r].inputs[operand], Shard) and p.dim == dim
        ]

    def _divides(self, choice: Choice, operand: int, dim: int, size: int) -> bool:
        shards = 1
        for n in self._splits(choice, operand, dim):
            shards *= n
        return size % shards == 0

    def _divides_still(self, choice: Choice) -> bool:
        """A later mesh dim may split a dim further that an earlier row wants divided evenly."""
        return all(self._divides(choice, i, d, n) for r in choice[:-1] for i, d, n in self.rows[r].divides) and all(
            self._nonempty(choice, i, d) for r in choice[:-1] for i, d in self.rows[r].nonempty
        )

    def _nonempty(self, choice: Choice, operand: int, dim: int) -> bool:
        spec = self.specs[operand]
        sizes = {1 if spec is None else spec.shape[dim]}
        for n in self._splits(choice, operand, dim):
            sizes = {chunk(size, n, i)[0] for size in sizes for i in range(n)}
        return 0 not in sizes

    def _pending_fit(self, choice: Choice) -> bool:
        """Pending kinds on several mesh dims must commute: all alike, or sums with averages."""
        rows = [self.rows[r] for r in choice]
        for placements in (*zip(*(r.inputs for r in rows), strict=True), *zip(*(r.outputs for r in rows), strict=True)):
            kinds = {p.reduce_op for p in placements if p is not None and p.is_partial()}
            if len(kinds) > 1 and not kinds <= _COMMUTING:
                return False
        return True

    def target(self, choice: Choice, operand: int) -> tuple[Placement, ...]:
        """Where an operand must lie under a choice for the whole mesh."""
        return tuple(p for r in choice if (p := self.rows[r].inputs[operand]) is not None)

    def strategy(self, choice: Choice) -> PlacementStrategy:
        """A choice written out: specs of all inputs and outputs, and the cost of each redistribution."""
        mesh = self.schema.mesh
        inputs = tuple(
            None if s is None else s.with_placements(self.target(choice, i)) for i, s in enumerate(self.specs)
        )
        outputs = tuple(
            None if meta is None else TensorSpec(mesh, _output(self.rows, choice, o), meta)
            for o, meta in enumerate(self.outputs)
        )
        costs = tuple(
            0.0 if src is None or dst is None or src is dst else transition_cost(src, dst)
            for src, dst in zip(self.specs, inputs, strict=True)
        )
        return PlacementStrategy(
            inputs,
            outputs,
            costs,
            tuple(self.rows[r].name for r in choice),
            any(self.rows[r].lowered for r in choice),
        )


def _output(rows: Sequence[Row], choice: Choice, index: int) -> tuple[Placement, ...]:
    return tuple(p for r in choice if (p := rows[r].outputs[index]) is not None)


def exhaustive(problem: Problem) -> Iterator[tuple[Choice, PlacementStrategy]]:
    """Every legal choice for the whole mesh, in the order of the rows. For tools and tests; the planner never does
    this.
    """
    per_dim = [problem.candidates(m) for m in range(len(problem.mesh_shape))]
    for choice in product(*per_dim):
        if all(problem.allowed(choice[: n + 1]) for n in range(len(choice))):
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
