"""The problem of a whole step: which row each call takes and where each tensor rests, at the least cost together.

A call is a variable whose states are its legal rows on a mesh dim. A tensor with several uses is a variable whose
states are layouts: there it *rests*, moved once by whoever makes it. A parameter that is free rests where the plan
places it, and its gradient goes there. Any other tensor goes straight from the row that makes it to the row that uses
it. The problem is solved for one mesh dim at a time, with the joint costs of all mesh
dims and the others held as they are (:mod:`shardwise.program.step_solution`).

All costs are whole nanoseconds, so that sums are exact and equal on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

from attrs import define, field

from shardwise.errors import NoPlanError, PlacementError
from shardwise.kernel.placements import Placement, StridedShard, is_strided
from shardwise.kernel.rule import Row
from shardwise.kernel.signature import Kind
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.cost import Links, links_of, step_costs
from shardwise.planning.layout_graph import LayoutGraph, encode, graph_of
from shardwise.planning.path import path_cost
from shardwise.planning.path_search import Search
from shardwise.program.cheap_moves import CheapMoves
from shardwise.program.cost_graph import FORBIDDEN, NANOSECONDS
from shardwise.program.layer_fold import LayerFold
from shardwise.program.moment_prices import MomentPrices
from shardwise.program.step_graph import CallNode, Places, Sink, StepGraph
from shardwise.program.step_memory import StepMemory
from shardwise.program.step_moments import StepMoments
from shardwise.program.step_rows import Choices, RowTable, as_placements, in_whole, is_whole, placed, rows_that_ran
from shardwise.program.step_slices import Slices

__all__ = ["Assignment", "StepProblem"]

_MOVE = 1
"""Added to each move: among equals the plan with fewer collectives wins."""


@define(eq=False)
class Assignment:
    """A row per call and mesh dim, and where free parameters and tensors with several uses rest.

    ``cost`` is in nanoseconds, with the price of the bytes that it keeps.
    """

    rows: list[list[int]]
    rests: dict[int, Places]
    cost: int = 0

    def copy(self) -> Assignment:
        return Assignment([list(r) for r in self.rows], dict(self.rests), self.cost)

    def is_same(self, other: Assignment) -> bool:
        """Whether another one has the same rows, and tensors rest in the same layouts."""
        return self.rows == other.rows and self.rests == other.rests


@define(eq=False)
class StepProblem:
    """The problem of a step. ``call_costs(call, choices, rows)`` are seconds.

    ``free`` are parameters (tensor numbers) that may be placed anywhere; those that are ``pinned`` stay where an
    assignment has them. ``memory`` counts what a rank keeps, and
    ``price`` is what a kept byte costs, in nanoseconds: it makes less memory worth some time. ``prices`` are of what is
    held at each moment, too.
    """

    graph: StepGraph
    call_costs: Callable[[CallNode, Choices, Sequence[Row]], float]
    free: frozenset[int] = frozenset()
    memory: StepMemory | None = None
    price: Fraction = Fraction(0)
    pinned: frozenset[int] = frozenset()
    prices: MomentPrices | None = None
    #: Where tensors must rest on some mesh dims, and the rows that calls must take one of on each.
    held_rests: dict[int, dict[int, Placement]] = field(factory=dict)
    held_rows: dict[int, tuple[frozenset[int], ...]] = field(factory=dict)
    #: How deep the tags of its decisions look at least: those of another depth are not comparable with earlier ones.
    least_depth: int = 0
    #: Where it has many equal layers: what these cost and hold, counted once.
    fold: LayerFold | None = None
    choices: list[Choices] = field(init=False)
    resting: frozenset[int] = field(init=False)
    #: What the problems of single mesh dims are made of.
    slices: Slices = field(init=False)
    _moves: dict[Any, int] = field(factory=dict, init=False)
    _own: dict[Any, int] = field(factory=dict, init=False)
    #: Per tensor that a call makes, that call (an index) and which of its results it is.
    _makers: dict[int, tuple[int, int]] = field(factory=dict, init=False)
    #: Where the others lie.
    _fixed: dict[int, Places] = field(factory=dict, init=False)
    _links: Links = field(init=False)
    _cheap_moves: CheapMoves | None = field(default=None, init=False)
    #: Graphs of layouts that keep their edges while the step is solved.
    _searched: dict[int, LayoutGraph] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._links = links_of(self.graph.mesh)
        self.slices = Slices(self)
        for place, call in enumerate(self.graph.calls):
            for k, t in enumerate(call.results):
                if t is not None and self.graph.tensors[t].maker == call.number:
                    self._makers.setdefault(t, (place, k))
        self.choices = RowTable(self.graph).choices
        self.resting = frozenset(
            t.number
            for t in self.graph.tensors
            if t.maker is not None and t.root == t.number and self._use_count(t.number) > 1 and self._may_move(t.number)
        )
        self.resting |= self.free

    # -- what calls may do ---------------------------------------------------------------------------------------

    def _use_count(self, tensor: int) -> int:
        return len(self.graph.uses.get(tensor, ())) + sum(not s.stays for s in self.graph.ends.get(tensor, ()))

    def _may_move(self, tensor: int) -> bool:
        return self.graph.tensors[tensor].root not in self.graph.written

    def as_recorded(self) -> Assignment:
        """The choices that were made when the step was recorded."""
        known: dict[int, list[int]] = {}
        for call, choices in zip(self.graph.calls, self.choices, strict=True):
            # Calls with the same choices ran the same rows: these are part of what tells choices apart.
            if id(choices) not in known:
                known[id(choices)] = self._recorded_rows(call, choices)
        return self._left_as_made([list(known[id(choices)]) for choices in self.choices])

    def _recorded_rows(self, call: CallNode, choices: Choices) -> list[int]:
        mesh_shape = tuple(self.graph.mesh.shape)
        if choices.problem is None:  # one row per mesh dim, the one that ran
            return list(range(len(mesh_shape)))
        if choices.lost:
            return list(choices.lost)
        places = [(row.inputs, row.outputs) for row in choices.rows]
        return [places.index((row.inputs, row.outputs)) for row in rows_that_ran(call, mesh_shape)]

    def _left_as_made(self, rows: list[list[int]]) -> Assignment:
        """Rows for the calls, with every tensor where its row leaves it."""
        assignment = Assignment(rows, {})
        assignment.rests = {t: self.made(assignment, t) for t in self.resting}
        assignment.cost = self.cost(assignment)
        return assignment

    @cached_property
    def moments(self) -> StepMoments:
        """What a rank holds at each call."""
        return StepMoments(self)

    @property
    def has_lost(self) -> bool:
        """Whether some call took rows, when it was recorded, that a plan may not take."""
        return any(choices.lost for choices in self.choices)

    def as_replicated(self) -> Assignment:
        """Every call on whole tensors, where it has such a row and finds whole what may not move.

        Raises :class:`NoPlanError` where a call has neither such rows nor those that ran.
        """
        recorded = self.as_recorded().rows
        assignment = Assignment([list(ran) for ran in recorded], {})
        known: dict[Any, list[int]] = {}
        for place, choices in enumerate(self.choices):
            operands = enumerate(self.graph.calls[place].operands)
            stays = {i: self.made(assignment, t) for i, t in operands if t is not None and self.must_stay(place, i)}
            key = (id(choices), *stays.items())
            if key not in known:
                known[key] = _whole_rows(choices, stays, recorded[place])
            assignment.rows[place] = list(known[key])
            if choices.lost == tuple(known[key]):
                raise NoPlanError(
                    asked=f"decide for the {len(self.choices)} calls of a step together",
                    found=f"{self.graph.calls[place]} ran on strided shards that no plan may ask for, and cannot run "
                    "on whole tensors",
                    do="Run the program without a plan, or redistribute its operand before.",
                )
        return self._left_as_made(assignment.rows)

    def operand_names(self, place: int) -> list[str]:
        """The names of the arguments of a call that its flat operands belong to."""
        schema = self.graph.calls[place].schema
        starts = [
            (start, arg.name)
            for arg, start in zip(schema.signature.args, schema.starts, strict=True)
            if arg.kind in {Kind.TENSOR, Kind.TENSORS}
        ]
        return [[name for start, name in starts if start <= i][-1] for i in range(len(schema.specs))]

    # -- layouts -------------------------------------------------------------------------------------------------

    def made(self, assignment: Assignment, tensor: int) -> Places:
        """The layout in which a tensor is made."""
        maker = self._makers.get(tensor)
        if maker is not None:
            place, i = maker
            return self.choices[place].sides(assignment.rows[place])[1][i]
        fixed = self._fixed.get(tensor)
        if fixed is None:
            spec = self.graph.tensors[tensor].spec
            fixed = self._fixed[tensor] = in_whole(spec.placements, spec.mesh_shape)
        return fixed

    def maker(self, tensor: int) -> tuple[int, int] | None:
        """The call that makes a tensor (an index) and which of its results it is; None for an input."""
        return self._makers.get(tensor)

    def used(self, assignment: Assignment, place: int, operand: int) -> Places:
        """The layout in which a call uses an operand."""
        return self.choices[place].sides(assignment.rows[place])[0][operand]

    def rests(self, assignment: Assignment, tensor: int) -> Places:
        """The layout from which the uses of a tensor take it."""
        return assignment.rests[tensor] if tensor in self.resting else self.made(assignment, tensor)

    # -- costs ---------------------------------------------------------------------------------------------------

    def move(self, tensor: int, src: Places, dst: Places) -> int:
        """Nanoseconds from one layout of a tensor to another."""
        if src == dst:
            return 0
        spec = self.graph.tensors[tensor].spec
        key = (spec.tensor_meta, src, dst)
        cost = self._moves.get(key)
        if cost is None:
            seconds = math.inf if _strides_anew(src, dst) else self._path_cost(spec.untagged, src, dst)
            cost = FORBIDDEN if math.isinf(seconds) else round(seconds * NANOSECONDS) + _MOVE
            self._moves[key] = cost
        return cost

    def least_move(self, tensor: int, src: Places, dst: Places) -> tuple[int, bool]:
        """Nanoseconds that a move costs at least, found without a search for its path, and whether it costs that."""
        spec = self.graph.tensors[tensor].spec
        known = 0 if src == dst else self._moves.get((spec.tensor_meta, src, dst))
        if known is not None:
            return known, True
        if _strides_anew(src, dst) or is_strided(src):
            return self.move(tensor, src, dst), True
        if self._cheap_moves is None:
            self._cheap_moves = CheapMoves(step_costs(tuple(self.graph.mesh.shape), self._links))
        return int(self._cheap_moves.seconds(spec.tensor_meta.nbytes, src, dst) * NANOSECONDS), False

    def _path_cost(self, spec: TensorSpec, src: Places, dst: Places) -> float:
        shape = spec.mesh_shape
        try:
            ends = spec.with_placements(as_placements(src, shape)), spec.with_placements(as_placements(dst, shape))
        except PlacementError:  # a strided shard that other mesh dims leave no room for
            return math.inf
        if is_strided((*src, *dst)):
            return path_cost(*ends)
        graph = graph_of(spec, self._links)
        self._searched[id(graph)] = graph
        search = Search(graph, *(tuple(map(encode, end.placements)) for end in ends))
        search.advance(math.inf)
        return search.lower

    def own_cost(self, place: int, rows: Sequence[int]) -> int:
        """Nanoseconds of a call for its work and what its lowering sends."""
        choices = self.choices[place]
        key = (id(choices), tuple(rows))
        cost = self._own.get(key)
        if cost is None:
            seconds = self.call_costs(self.graph.calls[place], choices, [choices.rows[r] for r in rows])
            cost = self._own[key] = round(seconds * NANOSECONDS)
        return cost

    def end_cost(self, tensor: int, layout: Places, assignment: Assignment | None = None) -> int:
        """Nanoseconds from a tensor's layout to its sinks; without an assignment, to those that lie fixed."""
        total = 0
        for sink in self.graph.ends.get(tensor, ()):
            if sink.stays:
                total += 0 if layout == sink.placements else FORBIDDEN
            elif assignment is not None or sink.leaf not in self.free:
                cost = self.move(tensor, layout, self.target(assignment, sink))
                total += cost if cost >= FORBIDDEN else cost // sink.shared_by
        return min(total, FORBIDDEN)

    def target(self, assignment: Assignment | None, sink: Sink) -> Places:
        """Where a sink has its tensor: the gradient of a free parameter lies as that does."""
        if assignment is None or sink.leaf is None or sink.leaf not in self.free:
            return sink.placements
        return assignment.rests[sink.leaf]

    def free_leaves(self, tensor: int) -> Iterator[tuple[int, int]]:
        """The free parameters whose gradient a tensor is, and how many gradients share the move there."""
        for sink in self.graph.ends.get(tensor, ()):
            if sink.leaf is not None and sink.leaf in self.free:
                yield sink.leaf, sink.shared_by

    def has_price(self, tensor: int) -> bool:
        """Whether what a rank keeps of a tensor costs something."""
        return bool(self.price) and self.memory is not None and tensor in self.memory.kept

    def byte_cost(self, tensor: int, layout: Places) -> int:
        """The price of what a rank keeps of a tensor."""
        if self.memory is None or not self.has_price(tensor):
            return 0
        return min(_times(self.memory.kept_bytes(tensor, layout), self.price), FORBIDDEN)

    def nbytes(self, assignment: Assignment) -> int:
        """What a rank keeps: the state of all parameters, and what forward leaves for backward."""
        memory = self.memory
        assert memory is not None
        copies = (
            memory.copied_bytes(place, i, self._source(assignment, place, i), self.used(assignment, place, i))
            for place, i in memory.copies
        )
        return sum(memory.kept_bytes(t, self.rests(assignment, t)) for t in memory.kept) + sum(copies)

    def _source(self, assignment: Assignment, place: int, operand: int) -> Places:
        t = self.graph.calls[place].operands[operand]
        assert t is not None
        return self.rests(assignment, t)

    def keeps_copy(self, place: int, operand: int) -> bool:
        """Whether what a rank keeps of a copy of an operand costs something."""
        return bool(self.price) and self.memory is not None and (place, operand) in self.memory.copies

    def copy_cost(self, place: int, operand: int, src: Places, dst: Places) -> int:
        """The price of what a rank keeps of the copy that brings an operand to a call."""
        if self.memory is None or not self.keeps_copy(place, operand):
            return 0
        return min(_times(self.memory.copied_bytes(place, operand, src, dst), self.price), FORBIDDEN)

    def cost_of_call(self, assignment: Assignment, place: int) -> int:
        """Nanoseconds of a call under an assignment, with the moves of its operands and results."""
        call = self.graph.calls[place]
        total = self.own_cost(place, assignment.rows[place])
        for i, t in enumerate(call.operands):
            if t is not None:
                src, dst = self.rests(assignment, t), self.used(assignment, place, i)
                total += self.operand_cost(place, i, src, dst) + self.copy_cost(place, i, src, dst)
        for t in call.results:
            if t is None:
                continue
            if t in self.resting:
                total += self.move(t, self.made(assignment, t), assignment.rests[t])
            total += self.end_cost(t, self.rests(assignment, t), assignment)
        return total if self.prices is None else total + self.prices.of_call(assignment, place)

    def cost(self, assignment: Assignment) -> int:
        """Nanoseconds of the step under an assignment."""
        if self.fold is not None and self.prices is None:
            total = self.fold.cost_of_calls(assignment)
        else:
            total = sum(self.cost_of_call(assignment, place) for place in range(len(self.graph.calls)))
        if self.prices is not None:
            total += sum(self.prices.of_leaf(t, self.rests(assignment, t)) for t in sorted(self.free))
        if self.memory is not None and self.price:
            total += sum(self.byte_cost(t, self.rests(assignment, t)) for t in self.memory.kept)
        return min(total, FORBIDDEN)

    def operand_cost(self, place: int, operand: int, src: Places, dst: Places) -> int:
        """Nanoseconds to bring an operand to a call; forbidden for one that must stay where it is."""
        call = self.graph.calls[place]
        t = call.operands[operand]
        assert t is not None
        if src == dst:
            return 0
        return FORBIDDEN if self.must_stay(place, operand) else self.move(t, src, dst)

    def must_stay(self, place: int, operand: int) -> bool:
        """Whether a call must find an operand as it uses it: it is written, or a number, or its memory is shared by a
        result and written by some call. A view of a moved tensor is a copy.
        """
        call = self.graph.calls[place]
        if operand in call.schema.written or operand in call.schema.fixed:
            return True
        t = call.operands[operand]
        assert t is not None
        root = self.graph.tensors[t].root
        return root in self.graph.written and any(
            r is not None and self.graph.tensors[r].root == root for r in call.results
        )

    def share_moves(self, other: StepProblem) -> None:
        """Know the costs of moves that another problem on the same mesh knows, and the other way round."""
        self._moves = other._moves

    def let_go(self) -> None:
        """Hold nothing any more: every call may take each of its rows, and results may rest anywhere."""
        self.held_rests.clear()
        self.held_rows.clear()

    def forget_searches(self) -> None:
        """Give back the memory of the searches; costs stay known."""
        for graph in self._searched.values():
            graph.keep_paths_only()
        self._searched.clear()


def _times(nbytes: int, price: Fraction) -> int:
    """The price of some bytes, rounded down: many times as fast as a product of fractions."""
    return nbytes * price.numerator // price.denominator


def _whole_rows(choices: Choices, stays: Mapping[int, Places], recorded: Sequence[int]) -> list[int]:
    """Rows of whole tensors that find operands where these stay, or those that ran."""
    chosen: list[int] = []
    for m, legal in enumerate(choices.legal):
        rows = [r for r in legal if all(placed(choices.rows[r].inputs[i]) == at[m] for i, at in stays.items())]
        rows.sort(key=lambda r: (not is_whole(choices.rows[r]), r != recorded[m]))
        chosen += rows[:1]
    return chosen if len(chosen) == len(choices.legal) and choices.allows(chosen) else list(recorded)


def _strides_anew(src: Places, dst: Places) -> bool:
    """Whether a mesh dim gets a strided shard that it did not have: only views make them, which need not move."""
    return any(isinstance(q, StridedShard) and p != q for p, q in zip(src, dst, strict=True))
