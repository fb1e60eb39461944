"""The choice: the cheapest legal row per mesh dim, exactly, without trying them all.

Best-first search over the mesh dims. A prefix of a choice has a lower bound (see ``bounds``). A whole choice has one
search per operand for its path, and these searches advance only as long as the choice may still be the cheapest. The
first choice that leaves the heap with its exact cost is the cheapest.

Example: a rule with the rows 0 and 1 on a (2, 2) mesh, where row 0 costs at least 0 on either mesh dim, and row 1 at
least 5. The heap starts with the prefix (0,), bound 0. When it leaves, (1,), bound 5, and (0, 0), bound 0, are pushed.
(0, 0) is whole: its exact cost is 7, and it is pushed back with 7. Now (1,) and (0, 1), both bound 5, are looked at.
(0, 0) leaves the heap again, as the cheapest, once every other entry has a bound above 7.

Ties go to the choice whose row indices come first, mesh dim 0 before mesh dim 1, in the order of the rule's rows.
Nothing else decides, so every rank decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import itemgetter

from shardwise.planning.bounds import Bounds
from shardwise.planning.cost import links_of
from shardwise.planning.layout_graph import Codes, LayoutGraph, graph_of, searching
from shardwise.planning.path_search import Search
from shardwise.planning.problem import Choice, Problem, no_choice

__all__ = ["Chooser"]

# What is known of an entry of the heap: a bound from its mesh dims one by one, or from all of them, or its cost.
_FIRST, _REFINED, _EXACT = range(3)
# A row on one mesh dim: the least that it costs, its index, and what of that is due before the first byte.
_Step = tuple[float, int, float]
# Bound, what is known, rows, place of the last row in its mesh dim's order, sums over the rows of a step's two figures.
_Entry = tuple[float, int, Choice, int, float, float]


class Chooser:
    """The search for the cheapest choice of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Per operand, its code in each row.
        self._inputs = tuple(zip(*problem.table.inputs, strict=True))
        #: Per operand that is present: its index, its graph, the bounds on leaving where it lies.
        self._operands: list[tuple[int, LayoutGraph, Bounds]] = []
        known: dict[int, tuple[LayoutGraph, Bounds]] = {}
        for i, (spec, source) in enumerate(zip(problem.specs, problem.sources, strict=True)):
            if spec is not None and source is not None:
                if id(spec) not in known:
                    graph = graph_of(spec, links_of(spec.mesh))
                    known[id(spec)] = graph, Bounds(graph, source)
                self._operands.append((i, *known[id(spec)]))
        self._steps = self._all_steps()
        # What the mesh dims from each on must cost.
        self._rest = self._sums(0)
        self._rest_before = self._sums(2)
        self._searches: dict[tuple[int, Codes], Search] = {}
        self._weighed: dict[Choice, list[Search]] = {}
        self._heap: list[_Entry] = []

    def _all_steps(self) -> list[list[_Step]]:
        # Mesh dims of the same size, links and placements have the same steps.
        known: dict[object, list[_Step]] = {}
        found = []
        for m, n in enumerate(self._problem.mesh_shape):
            figures = self._operands[0][1].alone[m] if self._operands else ()
            alike = (n, figures, *(bounds.source[m] for _, _, bounds in self._operands))
            if alike not in known:
                known[alike] = self._sorted_steps(m)
            found.append(known[alike])
        return found

    def _sorted_steps(self, mesh_dim: int) -> list[_Step]:
        """The candidates of one mesh dim, cheapest first."""
        found = []
        for row in self._problem.candidates(mesh_dim):
            before = whole = 0.0
            for i, _, bounds in self._operands:
                code = self._inputs[i][row]
                if code is not None and code != bounds.source[mesh_dim]:
                    fixed, moving = bounds.step(mesh_dim, code)
                    before += fixed
                    whole += fixed + moving
            found.append((whole, row, before))
        found.sort()
        return found

    def _sums(self, figure: int) -> list[float]:
        found = [0.0]
        for steps in reversed(self._steps):
            found.append(found[-1] + min(map(itemgetter(figure), steps)))
        return found[::-1]

    def best(self) -> tuple[Choice, list[float]]:
        """The cheapest choice and what each operand's redistribution costs; raises when no rows go together."""
        with searching(*(graph for _, graph, _ in self._operands)):
            choice = next(self.ranked(), None)
        if choice is None:
            raise no_choice(self._problem)
        return choice, self.costs(choice)

    def ranked(self) -> Iterator[Choice]:
        """Every legal choice, cheapest first; each is searched for when it is asked for. To be called once."""
        self._push((), 0, 0.0, 0.0)
        while self._heap:
            entry = heappop(self._heap)
            known, choice = entry[1], entry[2]
            if known == _EXACT:
                yield choice
                continue
            if known == _FIRST:
                self._sibling(entry)
                if self._problem.conflict(choice) is not None or self._put_off(entry):
                    continue
            if len(choice) < len(self._steps):
                self._push(choice, 0, entry[4], entry[5])
            else:
                self._weigh(entry)

    # -- prefixes --
    def _push(self, prefix: Choice, place: int, whole: float, before: float) -> None:
        """Put a prefix with one more row on the heap."""
        cost, row, fixed = self._steps[len(prefix)][place]
        longer = (*prefix, row)
        whole += cost
        heappush(self._heap, (whole + self._rest[len(longer)], _FIRST, longer, place, whole, before + fixed))

    def _sibling(self, entry: _Entry) -> None:
        """Put the same prefix with the next row on its last mesh dim on the heap."""
        _, _, choice, place, whole, before = entry
        steps = self._steps[len(choice) - 1]
        if place + 1 < len(steps):
            cost, _, fixed = steps[place]
            self._push(choice[:-1], place + 1, whole - cost, before - fixed)

    def _put_off(self, entry: _Entry) -> bool:
        """Raise the bound of a prefix by the bytes that it must receive; True if it was pushed back onto the heap."""
        bound, _, choice, place, whole, before = entry
        if not whole:
            return False
        moving = back = 0.0
        for i, _, bounds in self._operands:
            target = self._target(choice, i)
            if target != bounds.source[: len(target)]:
                received, returned = bounds.prefix(target)
                moving += received
                back += returned
        found = max(bound, before + self._rest_before[len(choice)] + moving) + back
        if found <= bound:
            return False
        heappush(self._heap, (found, _REFINED, choice, place, whole, before))
        return True

    def _target(self, choice: Choice, operand: int) -> Codes:
        codes = self._inputs[operand]
        return tuple([codes[r] for r in choice])

    # -- whole choices --
    def _searches_of(self, choice: Choice) -> list[Search]:
        found = self._weighed.get(choice)
        if found is not None:
            return found
        found = self._weighed[choice] = []
        for i, graph, bounds in self._operands:
            target = self._target(choice, i)
            if target != bounds.source:
                search = self._searches.get((i, target))
                if search is None:
                    search = self._searches[i, target] = Search(graph, bounds.source, target)
                found.append(search)
        return found

    def _weigh(self, entry: _Entry) -> None:
        """Advance the searches of a choice while no other entry has a lower bound, and push it back."""
        bound, _, choice, place, whole, before = entry
        searches = self._searches_of(choice)
        rival = self._heap[0][0] if self._heap else math.inf
        cost = sum(search.lower for search in searches)
        for search in searches:
            if cost <= bound and not search.done:
                search.advance(rival - (cost - search.lower))
                cost = sum(search.lower for search in searches)
        known = _EXACT if all(search.done for search in searches) else _REFINED
        heappush(self._heap, (cost if known == _EXACT else max(cost, bound), known, choice, place, whole, before))

    def costs(self, choice: Choice) -> list[float]:
        """What each operand's redistribution costs under a choice that :meth:`ranked` gave, in seconds."""
        costs = [0.0] * len(self._problem.specs)
        for i, _, bounds in self._operands:
            target = self._target(choice, i)
            if target != bounds.source:
                costs[i] = self._searches[i, target].lower
        return costs
