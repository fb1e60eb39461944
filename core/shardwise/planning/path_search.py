"""The search for the cheapest way from one layout to another: A* that can be stopped and taken up again.

Its estimate never exceeds the true cost, so costs are distances: not negative, zero only between equal layouts, and
never more than a detour. Among equally cheap ways the one found first wins; the order of the search depends on layouts
and figures alone.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from shardwise.planning.bounds import Estimate
from shardwise.planning.layout_graph import Codes, Edge, LayoutGraph

__all__ = ["Search"]


class Search:
    """The search of one way. ``lower`` never exceeds its cost and grows as the search advances; once ``done`` it is the
    cost, infinite when there is no way. New names on mesh dims of one rank are in the cost and not in the steps.
    """

    __slots__ = (
        "_best",
        "_came",
        "_estimate",
        "_goal",
        "_heap",
        "_limit",
        "_renaming",
        "_start",
        "done",
        "graph",
        "lower",
        "steps",
    )

    def __init__(self, graph: LayoutGraph, start: Codes, goal: Codes) -> None:
        self.graph = graph
        self._renaming = 0.0
        if graph.single:
            # The placements of mesh dims of one rank change freely, and the data stays.
            self._renaming = sum(start[m] != goal[m] for m in graph.single) * graph.costs.copy(0)
            start, goal = graph.settled(start), graph.settled(goal)
        self._start, self._goal = start, goal
        self.done = False
        if start == goal:
            self._finish((0.0, ()))
        elif (start, goal) in graph.found:
            self._finish(graph.found[start, goal])
        else:
            self._estimate = Estimate(graph, goal)
            self._best = {start: 0.0}
            self._came: dict[Codes, tuple[Codes, Edge]] = {}
            self._limit = math.inf
            first = self._estimate(start)
            self._heap = [(first, 0.0, start)]
            self.lower = self._renaming + first

    def advance(self, until: float) -> None:
        """Search on while ``lower`` is at most ``until``; at least one step."""
        if self.done:
            return
        while not self._expand() and self.lower <= until:
            pass

    def _expand(self) -> bool:
        """One step; whether the search is done."""
        _, so_far, layout = heappop(self._heap)
        if layout == self._goal:
            self._finish((so_far, self._trace()))
            return True
        if so_far <= self._best[layout]:
            self._follow(layout, so_far)
        if not self._heap:
            self._finish(None)
            return True
        self.lower = max(self.lower, self._renaming + self._heap[0][0])
        return False

    def _follow(self, layout: Codes, so_far: float) -> None:
        best, estimate, goal = self._best, self._estimate, self._goal
        for edges in (self.graph.edges(layout), self.graph.fills(layout, goal)):
            for edge in edges:
                after = edge[1]
                cost = so_far + edge[0]
                known = best.get(after)
                if cost >= (self._limit if known is None else known):
                    continue
                total = cost + estimate(after)
                if total >= self._limit:
                    continue
                if after == goal:
                    self._limit = total
                best[after] = cost
                self._came[after] = (layout, edge)
                heappush(self._heap, (total, cost, after))

    def _trace(self) -> tuple[Edge, ...]:
        edges = []
        layout = self._goal
        while layout != self._start:
            layout, edge = self._came[layout]
            edges.append(edge)
        return tuple(edges[::-1])

    def _finish(self, path: tuple[float, tuple[Edge, ...]] | None) -> None:
        self.done = True
        self.lower = math.inf if path is None else self._renaming + path[0]
        #: The steps in order, ``None`` when there is no way.
        self.steps = None if path is None else path[1]
        if self._start != self._goal:
            self.graph.remember(self._start, self._goal, path)
