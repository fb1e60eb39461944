"""What a call sends by itself, known when its plan is made: its moves, and what its rule's lowering sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Protocol

from attrs import evolve, frozen

from shardwise.engine.traffic import Collective, Issued, in_lowering, in_path
from shardwise.kernel.precedence import Entry
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import SymbolicSpec, TensorSpec, hinted
from shardwise.planning.path import shortest_path

__all__ = ["WRITTEN_BACK", "Moved", "Sends", "move_of", "sends_of", "together"]

_NOTHING = Issued(())
WRITTEN_BACK = ", written back"
"""How the name of a move ends that brings a written operand back to its layout."""


class Described(Protocol):
    """A call as its rule sees it: :class:`shardwise.engine.make_plan.DescribedCall`."""

    @property
    def entry(self) -> Entry: ...
    @property
    def schema(self) -> OpSchema: ...
    @property
    def call(self) -> Call: ...


@frozen
class Moved:
    """A tensor that a call brings to another layout. ``place`` is its place among the call's operands, if it is one
    that stays moved for later calls; ``is_of_result`` says that the call moves a result, as was decided for a step.
    """

    name: str
    src: TensorSpec
    dst: TensorSpec
    collectives: tuple[Collective, ...]
    place: int | None = None
    is_of_result: bool = False


@frozen
class Sends:
    """All that a call sends without being asked; ``lowering`` is what its rule's lowering sends after the moves.

    ``is_explicit`` says that a plan file, which a person can read, decided it.
    """

    schema: OpSchema
    moves: tuple[Moved, ...]
    lowering: Issued
    is_explicit: bool = False

    def collectives(self, kept: Iterable[int] = ()) -> Iterator[tuple[Moved | None, Collective]]:
        """Each collective and the move that it belongs to, in order; without moves of ``kept`` operands."""
        for move in self.moves:
            if move.place is None or move.place not in kept:
                yield from ((move, one) for one in move.collectives)
        yield from ((None, one) for one in self.lowering.collectives)


def move_of(
    name: str, src: TensorSpec, dst: TensorSpec, place: int | None = None, *, is_of_result: bool = False
) -> Moved | None:
    """A move; ``None`` if it sends nothing. Sizes that are symbols count as their hints."""
    if src.placements == dst.placements:
        return None
    source, target = (hinted(spec).untagged for spec in (src, dst))
    collectives = in_path(source, shortest_path(source, target), name)
    return Moved(name, source, target, tuple(collectives), place, is_of_result) if collectives else None


def sends_of(
    described: Described,
    inputs: Sequence[TensorSpec | None],
    results: Sequence[TensorSpec | None],
    *,
    is_lowered: bool,
    is_shared: bool,
    is_explicit: bool,
) -> Sends | None:
    """What a call sends whose operands are brought to ``inputs``; ``None`` if it sends nothing. With ``is_shared`` they
    stay moved for later calls.
    """
    schema = described.schema
    operands = zip(schema.operand_names, schema.specs, inputs, strict=True)
    moves = tuple(
        move
        for i, (name, src, dst) in enumerate(operands)
        if src is not None
        and dst is not None
        and (move := move_of(name, src, dst, i if is_shared else None)) is not None
    )
    lowering = _NOTHING
    if is_lowered and schema.mesh.size() > 1:
        lowering = _issued(described, inputs, results)
    if not moves and not lowering.collectives and lowering.complete:
        return None
    return Sends(schema, moves, lowering, is_explicit)


def _issued(described: Described, inputs: Sequence[TensorSpec | None], results: Sequence[TensorSpec | None]) -> Issued:
    schema = described.schema
    if any(isinstance(spec, SymbolicSpec) for spec in schema.specs):
        return Issued((), complete=False)  # only a run with numbers can say
    most: dict[tuple[str, tuple[int, ...]], Collective] = {}
    complete = True
    for coordinate in _coordinates(tuple(schema.mesh.shape)):
        issued = in_lowering(described.entry, schema, schema.values, described.call, inputs, results, coordinate)
        complete &= issued.complete
        for one in issued.collectives:
            known = most.get((one.kind, one.mesh_dims))
            if known is None or known.nbytes < one.nbytes:
                most[one.kind, one.mesh_dims] = one
    return Issued(tuple(most.values()), complete)


def _coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The ranks that may send more than others: the first, of which a part may be the largest, the last, and those
    between, which have two neighbours.
    """
    yield from product(*(sorted({0, min(1, n - 1), n // 2, n - 1}) for n in mesh_shape))


def together(
    sends: Iterable[Sends | None],
    schema: OpSchema,
    more: Iterable[Moved | None] = (),
    *,
    is_explicit: bool | None = None,
) -> Sends | None:
    """What a call sends that consists of others, and of some moves. The operands of a single one are its own.

    ``is_explicit`` says that a plan file decided all of it; by default, whether it decided the others.
    """
    parts = [part for part in sends if part is not None]
    is_one = len(parts) == 1 and len(parts[0].schema.specs) == len(schema.specs)
    extra = tuple(move for move in more if move is not None)
    if not parts and not extra:
        return None
    moves = tuple(move if is_one else evolve(move, place=None) for part in parts for move in part.moves)
    issued = tuple(one for part in parts for one in part.lowering.collectives)
    lowering = Issued(issued, complete=all(part.lowering.complete for part in parts))
    if is_explicit is None:
        is_explicit = bool(parts) and all(part.is_explicit for part in parts)
    return Sends(schema, (*extra, *moves), lowering, is_explicit)
