"""The choice: the cheapest legal row per mesh dim, exactly, without trying every combination.

Best-first search over the mesh dims. The heap holds prefixes of choices by a lower bound on their cost (see
``bounds``). A whole choice has one path search per operand. These searches advance only as long as the choice may still
be the cheapest. The first choice that leaves the heap with its exact cost is the cheapest.

Example: a rule has the rows 0 and 1, the mesh is (2, 2). On either mesh dim, row 0 costs at least 0 and row 1 at least
5. The heap starts with the prefix (0,), bound 0. When it leaves, (1,), bound 5, and (0, 0), bound 0, are pushed. (0, 0)
is whole. Its exact cost is 7, so it is pushed back with 7. Then (1,) and (0, 1), both bound 5, leave the heap. Once
every other entry has a bound above 7, (0, 0) leaves it again: it is the cheapest.

Of equally cheap choices, the one with the smaller row index on the first mesh dim on which they differ wins. Nothing
else decides, so every rank has the same choice.

Every step costs more than nothing. So where the operands already lie as a legal choice needs them, the first such
choice is the cheapest, without a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import itemgetter

from shardwise.planning.bounds import Bounds
from shardwise.planning.cost import Links, links_of
from shardwise.planning.layout_graph import Codes, LayoutGraph, graph_of, searching
from shardwise.planning.path_search import Search
from shardwise.planning.problem import Choice, Problem, no_choice

__all__ = ["Chooser", "best"]

# The figure of a heap entry is a bound from its mesh dims one by one, or from all of them together, or its exact cost.
_FIRST, _REFINED, _EXACT = range(3)
# A candidate row of one mesh dim: a bound on its cost, its index, and the part of the bound before the first byte.
_Candidate = tuple[float, int, float]
# The figure and which of the three it is; the rows, and the last row's index among the candidates of its mesh dim; the
# sums over the rows of the candidates' two bounds.
_Entry = tuple[float, int, Choice, int, float, float]


def best(problem: Problem) -> tuple[Choice, list[float]]:
    """The cheapest choice, and seconds per operand for its redistribution.

    Raises :class:`NoStrategyError` when no combination of rows is legal.
    """
    choice = _unmoved(problem)
    if choice is not None:
        return choice, [0.0] * len(problem.specs)
    chooser = Chooser(problem)
    with searching(*chooser.graphs):
        choice = next(chooser.ranked(), None)
    if choice is None:
        raise no_choice(problem)
    return choice, chooser.costs(choice)


def _unmoved(problem: Problem) -> Choice | None:
    """The first legal choice under which every operand stays as it is; None where there is none."""
    inputs, per_dim = problem.table.inputs, []
    for m in range(len(problem.mesh_shape)):
        here = tuple([None if source is None else source[m] for source in problem.sources])
        rows = [r for r, codes in enumerate(inputs) if codes == here and (not problem.same or problem.keeps_written(r))]
        if not rows:
            return None
        per_dim.append(rows)

    def longer(prefix: Choice) -> Choice | None:
        if len(prefix) == len(per_dim):
            return prefix
        choices = ((*prefix, r) for r in per_dim[len(prefix)])
        return next((whole for c in choices if problem.conflict(c) is None and (whole := longer(c)) is not None), None)

    return longer(())


class Chooser:
    """The search for the cheapest choice of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Per operand, its code in each row.
        self._inputs = tuple(zip(*problem.table.inputs, strict=True))
        #: Per operand that is present: its index, its graph, the bounds on leaving its layout.
        self._operands: list[tuple[int, LayoutGraph, Bounds]] = []
        known: dict[int, tuple[LayoutGraph, Bounds]] = {}
        links: Links | None = None
        for i, (spec, source) in enumerate(zip(problem.specs, problem.sources, strict=True)):
            if spec is not None and source is not None:
                if id(spec) not in known:
                    links = links or links_of(spec.mesh)
                    graph = graph_of(spec, links)
                    known[id(spec)] = graph, Bounds(graph, source)
                self._operands.append((i, *known[id(spec)]))
        self._candidates = self._sorted_candidates()
        # From each mesh dim on, the least of the candidates' two bounds.
        self._rest = self._sums(0)
        self._rest_before = self._sums(2)
        self._searches: dict[tuple[int, Codes], Search] = {}
        self._searches_of: dict[Choice, list[Search]] = {}
        self._heap: list[_Entry] = []

    def _sorted_candidates(self) -> list[list[_Candidate]]:
        """The candidates of each mesh dim, cheapest first."""
        # Mesh dims of the same size, links and placements have the same candidates.
        known: dict[object, list[_Candidate]] = {}
        per_dim = []
        for m, n in enumerate(self._problem.mesh_shape):
            figures = self._operands[0][1].alone[m] if self._operands else ()
            key = (n, figures, *(bounds.source[m] for _, _, bounds in self._operands))
            candidates = known.get(key)
            if candidates is None:
                candidates = known[key] = []
                for row in self._problem.candidates(m):
                    before = whole = 0.0
                    for i, _, bounds in self._operands:
                        code = self._inputs[i][row]
                        if code is not None and code != bounds.source[m]:
                            fixed, moving = bounds.step(m, code)
                            before += fixed
                            whole += fixed + moving
                    candidates.append((whole, row, before))
                candidates.sort()
            per_dim.append(candidates)
        return per_dim

    def _sums(self, figure: int) -> list[float]:
        sums = [0.0]
        for candidates in reversed(self._candidates):
            sums.append(sums[-1] + min(map(itemgetter(figure), candidates)))
        return sums[::-1]

    @property
    def graphs(self) -> list[LayoutGraph]:
        """The graphs that are searched."""
        return [graph for _, graph, _ in self._operands]

    def ranked(self) -> Iterator[Choice]:
        """Every legal choice, cheapest first. The search goes on when the next one is asked for. Call this once."""
        self._push((), 0, 0.0, 0.0)
        while self._heap:
            entry = heappop(self._heap)
            _, known, choice, index, whole, before = entry
            if known == _EXACT:
                yield choice
                continue
            if known == _FIRST:
                # Push the next candidate of the last mesh dim, before this one gets longer.
                candidates = self._candidates[len(choice) - 1]
                if index + 1 < len(candidates):
                    cost, _, fixed = candidates[index]
                    self._push(choice[:-1], index + 1, whole - cost, before - fixed)
                if self._problem.conflict(choice) is not None or self._raise_bound(entry):
                    continue
            if len(choice) < len(self._candidates):
                self._push(choice, 0, whole, before)
            else:
                self._advance_searches(entry)

    def _push(self, prefix: Choice, index: int, whole: float, before: float) -> None:
        """Push a prefix with one more row: a candidate of the next mesh dim."""
        cost, row, fixed = self._candidates[len(prefix)][index]
        longer = (*prefix, row)
        whole += cost
        heappush(self._heap, (whole + self._rest[len(longer)], _FIRST, longer, index, whole, before + fixed))

    def _raise_bound(self, entry: _Entry) -> bool:
        """Raise the bound of a prefix by the bytes that it must receive; True if it was pushed back onto the heap."""
        bound, _, choice, index, whole, before = entry
        if not whole:
            return False
        moving = back = 0.0
        for i, _, bounds in self._operands:
            target = self._target(choice, i)
            if target != bounds.source[: len(target)]:
                received, returned = bounds.prefix(target)
                moving += received
                back += returned
        raised = max(bound, before + self._rest_before[len(choice)] + moving) + back
        if raised <= bound:
            return False
        heappush(self._heap, (raised, _REFINED, choice, index, whole, before))
        return True

    def _target(self, choice: Choice, operand: int) -> Codes:
        codes = self._inputs[operand]
        return tuple([codes[r] for r in choice])

    def _advance_searches(self, entry: _Entry) -> None:
        """Advance the searches of a whole choice while no other entry has a lower bound, and push it back."""
        bound, _, choice, index, whole, before = entry
        searches = self._searches_of.get(choice)
        if searches is None:
            searches = self._searches_of[choice] = []
            for i, graph, bounds in self._operands:
                target = self._target(choice, i)
                if target != bounds.source:
                    search = self._searches.get((i, target))
                    if search is None:
                        search = self._searches[i, target] = Search(graph, bounds.source, target)
                    searches.append(search)
        rival = self._heap[0][0] if self._heap else math.inf
        cost = sum(search.lower for search in searches)
        for search in searches:
            if cost <= bound and not search.done:
                search.advance(rival - (cost - search.lower))
                cost = sum(search.lower for search in searches)
        known = _EXACT if all(search.done for search in searches) else _REFINED
        heappush(self._heap, (cost if known == _EXACT else max(cost, bound), known, choice, index, whole, before))

    def costs(self, choice: Choice) -> list[float]:
        """Seconds per operand for its redistribution, under a choice that :meth:`ranked` yielded."""
        costs = [0.0] * len(self._problem.specs)
        for i, _, bounds in self._operands:
            target = self._target(choice, i)
            if target != bounds.source:
                costs[i] = self._searches[i, target].lower
        return costs
