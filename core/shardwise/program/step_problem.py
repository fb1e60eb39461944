"""The problem of a whole step: which row each call takes and where each tensor rests, at the least cost together.

A call is a variable whose states are its legal rows on a mesh dim. A tensor with several uses is a variable whose
states are layouts: there it *rests*, moved once by whoever makes it. Any other tensor goes straight from the row that
makes it to the row that uses it. The problem is solved for one mesh dim at a time, with the joint costs of all mesh
dims and the others held as they are (:mod:`shardwise.program.step_solution`).

All costs are whole nanoseconds, so that sums are exact and equal on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from shardwise.errors import PlacementError
from shardwise.kernel.placements import REPLICATE, Placement, StridedShard, is_strided
from shardwise.kernel.rule import Row
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.cost import Links, links_of
from shardwise.planning.layout_graph import LayoutGraph, encode, graph_of
from shardwise.planning.path import path_cost
from shardwise.planning.path_search import Search
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.step_graph import CallNode, Places, StepGraph
from shardwise.program.step_rows import Choices, RowTable, as_placements, in_whole, rows_that_ran

__all__ = ["Assignment", "StepProblem", "placed"]

NANOSECONDS = 1e9
_MOVE = 1
"""Added to each move: among equals the plan with fewer collectives wins."""


@define(eq=False)
class Assignment:
    """A row per call and mesh dim, and where tensors with several uses rest."""

    rows: list[list[int]]
    rests: dict[int, Places]
    cost: int = 0

    def copy(self) -> Assignment:
        return Assignment([list(r) for r in self.rows], dict(self.rests), self.cost)


@define(eq=False)
class StepProblem:
    """The problem of a step. ``call_costs(call, choices, rows)`` are seconds."""

    graph: StepGraph
    call_costs: Callable[[CallNode, Choices, Sequence[Row]], float]
    choices: list[Choices] = field(init=False)
    resting: frozenset[int] = field(init=False)
    _moves: dict[Any, int] = field(factory=dict, init=False)
    _own: dict[Any, int] = field(factory=dict, init=False)
    _places: dict[int, int] = field(init=False)
    _links: Links = field(init=False)
    #: Graphs of layouts that keep their edges while the step is solved.
    _searched: dict[int, LayoutGraph] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._links = links_of(self.graph.mesh)
        self._places = {call.number: place for place, call in enumerate(self.graph.calls)}
        self.choices = RowTable(self.graph).choices
        self.resting = frozenset(
            t.number
            for t in self.graph.tensors
            if t.maker is not None and t.root == t.number and self._use_count(t.number) > 1 and self._may_move(t.number)
        )

    # -- what calls may do ---------------------------------------------------------------------------------------

    def _use_count(self, tensor: int) -> int:
        return len(self.graph.uses.get(tensor, ())) + sum(not s.stays for s in self.graph.ends.get(tensor, ()))

    def _may_move(self, tensor: int) -> bool:
        return self.graph.tensors[tensor].root not in self.graph.written

    def as_recorded(self) -> Assignment:
        """The choices that were made when the step was recorded."""
        mesh_shape = tuple(self.graph.mesh.shape)
        rows = []
        for call, choices in zip(self.graph.calls, self.choices, strict=True):
            ran = rows_that_ran(call, mesh_shape)
            if choices.problem is None:  # one row per mesh dim, the one that ran
                rows.append(list(range(len(mesh_shape))))
                continue
            places = [(row.inputs, row.outputs) for row in choices.rows]
            rows.append([places.index((row.inputs, row.outputs)) for row in ran])
        assignment = Assignment(rows, {})
        assignment.rests = {t: self.made(assignment, t) for t in self.resting}
        assignment.cost = self.cost(assignment)
        return assignment

    def as_replicated(self) -> Assignment:
        """Every call on whole tensors, where it has such a row: legal wherever operands may move."""
        rows = [list(ran) for ran in self.as_recorded().rows]
        for place, choices in enumerate(self.choices):
            whole = [next((r for r in legal if _is_whole(choices.rows[r])), None) for legal in choices.legal]
            chosen = [r for r in whole if r is not None]
            if len(chosen) == len(whole) and choices.allows(chosen):
                rows[place] = chosen
        assignment = Assignment(rows, {})
        assignment.rests = {t: self.made(assignment, t) for t in self.resting}
        assignment.cost = self.cost(assignment)
        return assignment

    # -- layouts -------------------------------------------------------------------------------------------------

    def made(self, assignment: Assignment, tensor: int) -> Places:
        """The layout in which a tensor is made."""
        node = self.graph.tensors[tensor]
        maker = self.maker(tensor)
        if maker is None:
            return in_whole(node.spec.placements, node.spec.mesh_shape)
        place, i = maker
        rows = self.choices[place].rows
        return tuple(placed(rows[r].outputs[i]) for r in assignment.rows[place])

    def maker(self, tensor: int) -> tuple[int, int] | None:
        """The call that makes a tensor (an index) and which of its results it is; None for an input."""
        number = self.graph.tensors[tensor].maker
        place = None if number is None else self._places.get(number)
        return None if place is None else (place, self.graph.calls[place].results.index(tensor))

    def used(self, assignment: Assignment, place: int, operand: int) -> Places:
        """The layout in which a call uses an operand."""
        rows = self.choices[place].rows
        return tuple(placed(rows[r].inputs[operand]) for r in assignment.rows[place])

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

    def end_cost(self, tensor: int, layout: Places) -> int:
        """Nanoseconds from a tensor's layout to its sinks."""
        total = 0
        for sink in self.graph.ends.get(tensor, ()):
            if sink.stays:
                total += 0 if layout == sink.placements else FORBIDDEN
            else:
                cost = self.move(tensor, layout, sink.placements)
                total += cost if cost >= FORBIDDEN else cost // sink.shared_by
        return min(total, FORBIDDEN)

    def cost(self, assignment: Assignment) -> int:
        """Nanoseconds of the step under an assignment."""
        total = 0
        for place, call in enumerate(self.graph.calls):
            total += self.own_cost(place, assignment.rows[place])
            for i, t in enumerate(call.operands):
                if t is not None:
                    total += self.operand_cost(place, i, self.rests(assignment, t), self.used(assignment, place, i))
            for t in call.results:
                if t is None:
                    continue
                if t in self.resting:
                    total += self.move(t, self.made(assignment, t), assignment.rests[t])
                total += self.end_cost(t, self.rests(assignment, t))
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

    def forget_searches(self) -> None:
        """Give back the memory of the searches; costs stay known."""
        for graph in self._searched.values():
            graph.keep_paths_only()
        self._searched.clear()


def _is_whole(row: Row) -> bool:
    return not row.lowered and all(p is None or p == REPLICATE for p in (*row.inputs, *row.outputs))


def _strides_anew(src: Places, dst: Places) -> bool:
    """Whether a mesh dim gets a strided shard that it did not have: only views make them, which need not move."""
    return any(isinstance(q, StridedShard) and p != q for p, q in zip(src, dst, strict=True))


def placed(placement: Placement | None) -> Placement:
    """The placement of a row; one without a placement is of a tensor that is not there."""
    return REPLICATE if placement is None else placement
