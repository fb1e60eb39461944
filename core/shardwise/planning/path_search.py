"""The search for the cheapest path from one layout to another: A* that can be stopped and continued.

Its estimate never exceeds the true cost, so costs are distances: not negative, zero only between equal layouts, and
never more than a detour. Among equally cheap paths the first one that the search reaches wins. The order of the search
depends on layouts and cost figures alone, so every rank has the same path.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import chain

from shardwise.planning.bounds import Estimate
from shardwise.planning.layout_graph import Codes, Edge, LayoutGraph

__all__ = ["Search"]


class Search:
    """The search for one path.

    ``lower`` never exceeds the path's cost and grows as the search advances. Once ``done`` it is the cost, infinite
    when there is no path. Changes of placement on mesh dims of one rank are in the cost, but not in ``steps``.
    """

    __slots__ = (
        "_best",
        "_came",
        "_estimate",
        "_goal",
        "_heap",
        "_limit",
        "_relabelling",
        "_start",
        "done",
        "graph",
        "lower",
        "steps",
    )

    def __init__(self, graph: LayoutGraph, start: Codes, goal: Codes) -> None:
        self.graph = graph
        self._relabelling = 0.0
        if graph.single:
            # A mesh dim of one rank changes its placement without moving data.
            self._relabelling = sum(start[m] != goal[m] for m in graph.single) * graph.costs.copy(0)
            start, goal = graph.settled(start), graph.settled(goal)
        self._start, self._goal = start, goal
        self.done = False
        if start == goal:
            self._finish((0.0, ()))
        elif (start, goal) in graph.paths:
            self._finish(graph.paths[start, goal])
        else:
            self._estimate = Estimate(graph, goal)
            self._best = {start: 0.0}
            self._came: dict[Codes, tuple[Codes, Edge]] = {}
            self._limit = math.inf
            bound = self._estimate(start)
            self._heap = [(bound, 0.0, start)]
            self.lower = self._relabelling + bound

    def advance(self, until: float) -> None:
        """Visit layouts, cheapest bound first, while ``lower`` is at most ``until``; at least one layout."""
        while not self.done:
            _, cost, layout = heappop(self._heap)
            if layout == self._goal:
                path = []
                while layout != self._start:
                    layout, edge = self._came[layout]
                    path.append(edge)
                self._finish((cost, tuple(path[::-1])))
                return
            if cost <= self._best[layout]:
                self._follow(layout, cost)
            if not self._heap:
                self._finish(None)
                return
            self.lower = max(self.lower, self._relabelling + self._heap[0][0])
            if self.lower > until:
                return

    def _follow(self, layout: Codes, cost: float) -> None:
        """Push the layouts to which a step leads more cheaply than any earlier path."""
        best, estimate, goal = self._best, self._estimate, self._goal
        for edge in chain(self.graph.edges(layout), self.graph.fills(layout, goal)):
            after = edge[1]
            cost_after = cost + edge[0]
            known = best.get(after)
            if cost_after >= (self._limit if known is None else known):
                continue
            total = cost_after + estimate(after)
            if total >= self._limit:
                continue
            if after == goal:
                self._limit = total
            best[after] = cost_after
            self._came[after] = (layout, edge)
            heappush(self._heap, (total, cost_after, after))

    def _finish(self, path: tuple[float, tuple[Edge, ...]] | None) -> None:
        self.done = True
        self.lower = math.inf if path is None else self._relabelling + path[0]
        #: The steps in order, ``None`` when there is no path.
        self.steps = None if path is None else path[1]
        if self._start != self._goal:
            self.graph.remember(self._start, self._goal, path)
