"""What one mesh dim of a step's problem is made of, each computed once: equal layers have equal parts.

A slice of a call is its rows on one mesh dim with those of the other mesh dims held. Lists of layouts are interned, so
that matrices of costs are known by the identities of the two lists that they are between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen

from shardwise.kernel.placements import REPLICATE, Partial, Placement, Shard, shard_dim
from shardwise.kernel.spec import TensorSpec
from shardwise.program.cost_graph import FORBIDDEN, Costs
from shardwise.program.step_graph import Places
from shardwise.program.step_rows import Choices, placed

if TYPE_CHECKING:
    from shardwise.program.step_problem import StepProblem

__all__ = ["CallSlice", "Layouts", "Slices"]

_LEAST_UNEVEN = 8
"""Elements of each rank's part that a parameter's dim must have where it does not divide: parts then differ by 13 %."""


@frozen(eq=False)
class Layouts:
    """An interned list of layouts: equal lists are one object."""

    each: tuple[Places, ...]


@define(eq=False)
class CallSlice:
    """The rows of a call on a mesh dim that are legal beside the held rows of the others."""

    choices: Choices
    held: tuple[int, ...]
    m: int
    rows: tuple[int, ...]
    _slices: Slices
    _placements: dict[tuple[int, bool], tuple[Placement, ...]] = field(factory=dict)
    _layouts: dict[tuple[int, bool], Layouts] = field(factory=dict)

    def placements(self, k: int, *, made: bool) -> tuple[Placement, ...]:
        """Those of an operand or result on the mesh dim, by row."""
        known = self._placements.get((k, made))
        if known is None:
            of = self.choices.rows
            each = ((of[r].outputs if made else of[r].inputs)[k] for r in self.rows)
            known = self._placements[k, made] = self._slices.interned(tuple(map(placed, each)))
        return known

    def layouts(self, k: int, *, made: bool) -> Layouts:
        """The layouts of an operand or result, by row."""
        known = self._layouts.get((k, made))
        if known is None:
            of = self.choices.rows
            held = tuple(placed((of[r].outputs if made else of[r].inputs)[k]) for r in self.held)
            known = self._slices.with_placements(held, self.m, self.placements(k, made=made))
            self._layouts[k, made] = known
        return known


@define(eq=False)
class Slices:
    """The parts of a problem that are known so far."""

    _problem: StepProblem
    _calls: dict[tuple[Any, ...], CallSlice] = field(factory=dict)
    _placements: dict[tuple[Placement, ...], tuple[Placement, ...]] = field(factory=dict)
    _layouts: dict[tuple[Places, ...], Layouts] = field(factory=dict)
    _known: dict[Any, Any] = field(factory=dict)
    #: The moves of matrices that are not exact everywhere, by the identity of the matrix, which is kept.
    _open: dict[int, tuple[int, Layouts, Layouts]] = field(factory=dict)
    _metas: dict[Any, int] = field(factory=dict)
    _meta_of: list[int] = field(factory=list)

    def interned(self, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return self._placements.setdefault(placements, placements)

    def _list(self, layouts: tuple[Places, ...]) -> Layouts:
        known = self._layouts.get(layouts)
        if known is None:
            known = self._layouts[layouts] = Layouts(layouts)
        return known

    def only(self, layout: Places) -> Layouts:
        """A list of one layout."""
        return self._list((layout,))

    def with_placements(self, held: Places, m: int, placements: tuple[Placement, ...]) -> Layouts:
        """A layout with each of some (interned) placements on a mesh dim."""
        key = ("with", held, m, id(placements))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._list(tuple((*held[:m], p, *held[m + 1 :]) for p in placements))
        result: Layouts = known
        return result

    def of_call(self, place: int, held: Sequence[int], m: int) -> CallSlice:
        """The slice of a call on a mesh dim beside held rows."""
        choices = self._problem.choices[place]
        only = self._problem.held_rows.get(place)
        key = (id(choices), m, tuple(held), only)
        known = self._calls.get(key)
        if known is None:
            legal = [r for r in choices.legal[m] if only is None or r in only[m]]
            rows = (r for r in legal if r == held[m] or choices.allows([*held[:m], r, *held[m + 1 :]]))
            known = self._calls[key] = CallSlice(choices, key[2], m, tuple(rows), self)
        return known

    def own_costs(self, place: int, call: CallSlice) -> Costs:
        """What a call costs apart from moves, by row."""
        key = ("own", id(call))
        known = self._known.get(key)
        if known is None:
            m, held = call.m, call.held
            each = [self._problem.own_cost(place, [*held[:m], r, *held[m + 1 :]]) for r in call.rows]
            known = self._known[key] = np.array(each, np.int64)
        result: Costs = known
        return result

    def end_costs(self, t: int, layouts: Layouts) -> Costs:
        """From a tensor's layouts to the sinks that lie fixed, with the price of what is kept of it."""
        problem = self._problem
        if t not in problem.graph.ends and not problem.has_price(t):
            return self._zeros(len(layouts.each))
        each = [problem.end_cost(t, at) + problem.byte_cost(t, at) for at in layouts.each]
        return np.array(each, np.int64)

    def _zeros(self, count: int) -> Costs:
        known = self._known.get(("zeros", count))
        if known is None:
            known = self._known["zeros", count] = np.zeros(count, np.int64)
        result: Costs = known
        return result

    def moves(
        self, t: int, sources: Layouts, targets: Layouts, *, must_stay: bool = False, exact: bool = True
    ) -> Costs:
        """The cost of a move of a tensor, by source and target.

        If not ``exact``, it is what a move costs at least, until :meth:`settle` is asked for a place: on many mesh dims
        there are far more moves than a solution looks at, and the search for the path of each takes a while.
        """
        if not exact and not must_stay:
            return self._open_moves(t, sources, targets)
        key = (self._meta(t), must_stay, id(sources), id(targets))
        known = self._known.get(key)
        if known is None:
            rows, columns = list(dict.fromkeys(sources.each)), list(dict.fromkeys(targets.each))
            move = self._problem.move
            small = np.array(
                [[(0 if a == b else FORBIDDEN) if must_stay else move(t, a, b) for b in columns] for a in rows],
                np.int64,
            )
            known = small[np.ix_([rows.index(a) for a in sources.each], [columns.index(b) for b in targets.each])]
            self._known[key] = known
        result: Costs = known
        return result

    def copies(self, place: int, operand: int, sources: Layouts, targets: Layouts) -> Costs:
        """The price of what is kept of the copy of an operand, by source and target."""
        t = self._problem.graph.calls[place].operands[operand]
        assert t is not None
        key = ("copies", self._problem.price, self._meta(t), id(sources), id(targets))
        known = self._known.get(key)
        if known is None:
            cost = self._problem.copy_cost
            each = [[cost(place, operand, a, b) for b in targets.each] for a in sources.each]
            known = self._known[key] = np.array(each, np.int64)
        result: Costs = known
        return result

    def _open_moves(self, t: int, sources: Layouts, targets: Layouts) -> Costs:
        key = ("open", self._meta(t), id(sources), id(targets))
        known = self._known.get(key)
        if known is None:
            least = self._problem.least_move
            each = [[least(t, a, b) for b in targets.each] for a in sources.each]
            known = self._known[key] = np.array([[cost for cost, _ in row] for row in each], np.int64)
            if not all(settled for row in each for _, settled in row):
                self._open[id(known)] = t, sources, targets
        result: Costs = known
        return result

    def settle(self, costs: Costs, source: int, target: int) -> bool:
        """Put in what a move costs exactly; whether that is more than it was."""
        moved = self._open.get(id(costs))
        if moved is None:
            return False
        t, sources, targets = moved
        before = int(costs[source, target])
        costs[source, target] = self._problem.move(t, sources.each[source], targets.each[target])
        return int(costs[source, target]) > before

    def _meta(self, t: int) -> int:
        """A number for the meta of a tensor: equal ones have the same."""
        if not self._meta_of:
            metas = (node.spec.tensor_meta for node in self._problem.graph.tensors)
            self._meta_of = [self._metas.setdefault(meta, len(self._metas)) for meta in metas]
        return self._meta_of[t]

    def union(self, made: tuple[Placement, ...], wanted: Sequence[tuple[Placement, ...]]) -> tuple[Placement, ...]:
        """Placements as made and as wanted (interned), each once; partial ones only as made."""
        key = ("union", id(made), *map(id, wanted))
        known = self._known.get(key)
        if known is None:
            more = (p for of in wanted for p in of if not isinstance(p, Partial) or p in made)
            known = self._known[key] = self.interned(tuple(dict.fromkeys([*made, *more])))
        result: tuple[Placement, ...] = known
        return result

    def places(self, leaf: int, held: Places, m: int) -> tuple[Placement, ...]:
        """Where a parameter may lie on a mesh dim: as held, whole, or along each dim that is long enough."""
        key = ("places", self._meta(leaf), held, m)
        known = self._known.get(key)
        if known is None:
            spec = self._problem.graph.tensors[leaf].spec
            known = self._known[key] = self.interned(
                tuple(dict.fromkeys([held[m], REPLICATE, *_shards(spec, held, m)]))
            )
        result: tuple[Placement, ...] = known
        return result


def _shards(spec: TensorSpec, held: Places, m: int) -> Iterator[Placement]:
    for dim, size in enumerate(spec.shape):
        pieces = math.prod(
            n for k, (p, n) in enumerate(zip(held, spec.mesh_shape, strict=True)) if k == m or shard_dim(p) == dim
        )
        if size % pieces == 0 or size >= pieces * _LEAST_UNEVEN:
            yield Shard(dim)
