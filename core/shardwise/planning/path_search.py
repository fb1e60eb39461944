"""The search for the cheapest path from one layout to another: A* that can be stopped and continued.

Its estimate never exceeds the true cost, so costs are distances: not negative, zero only between equal layouts, and
never more than a detour. Among equally cheap paths the first one that the search reaches wins. The order of the search
depends on layouts and cost figures alone, so every rank has the same path.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import chain

from shardwise.planning.bounds import apart, needed_late, splits
from shardwise.planning.cost import JUST_UNDER
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
            self._estimate = _Estimate(graph, goal)
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


class _Estimate:
    """A lower bound on the cost from a layout to ``goal``, whose code is 0 on mesh dims of one rank."""

    def __init__(self, graph: LayoutGraph, goal: Codes) -> None:
        self.goal = goal
        self._graph = graph
        self._alone = graph.alone
        links = graph.costs.links
        self._local_start = links.local_start
        self._least = graph.numel / graph.ranks * graph.itemsize
        self._copy = links.local_start + self._least / links.memory_bandwidth
        self._seconds_per_element = graph.fastest * graph.itemsize
        self._smallest = graph.numel / graph.ranks
        self._sizes = graph.sizes(goal)
        self._needed = math.prod(self._sizes)
        self._goal_bytes = graph.nbytes(goal)
        self._splits = splits(graph.mesh_shape, goal)
        self._known: dict[Codes, float] = {goal: 0.0}

    def __call__(self, layout: Codes) -> float:
        known = self._known.get(layout)
        if known is not None:
            return known
        start_gather = latency = local = 0.0
        reduced: dict[int, float] = {}
        contributors = 1
        copies = 0
        moving = 0  # the shard codes that earlier mesh dims leave or join, as bits; see `disturbed`
        for here, there, (n, start, doubling, _) in zip(layout, self.goal, self._alone, strict=True):
            if here == there:
                if here <= 0 or not moving >> here & 1:
                    continue
                local += min(doubling, self._copy)
            elif there > 0:
                moving |= 1 << there
            if here > 0:
                moving |= 1 << here
                latency += doubling
                start_gather = max(start_gather, start)
            elif here < 0:
                contributors *= n
                latency += doubling if there else 2 * doubling
                reduced[here] = max(reduced.get(here, 0.0), start)
            else:
                copies += 1
        if latency:
            bound = sum(reduced.values()) + start_gather + latency + local + copies * self._copy
            bound += self._received(layout, contributors) * self._seconds_per_element
        else:
            bound = self._copied(layout, copies)
        known = self._known[layout] = bound * JUST_UNDER
        return known

    def _received(self, layout: Codes, contributors: int) -> float:
        """As :func:`received`, for a whole goal."""
        if contributors > 1:
            return self._needed + (contributors - 2) * self._smallest
        late = apart(self._splits, layout)
        if late is not None and self._graph.is_even:
            return self._needed
        held = 1
        for size, needed in zip(self._graph.sizes(layout), self._sizes, strict=True):
            held *= min(size, needed)
        lacking = self._needed - held
        return lacking if late is None else max(lacking, needed_late(self._graph, self.goal, late))

    def _copied(self, layout: Codes, copies: int) -> float:
        """A bound where slices and fills suffice: cutting the largest mesh dim first writes least. With a collective in
        between it may be cheaper.
        """
        collective = min(start + doubling for n, start, doubling, _ in self._alone if n > 1)
        nbytes: float = self._graph.nbytes(layout)
        written = 0.0
        cuts = [n for n, h, g in zip(self._graph.mesh_shape, layout, self.goal, strict=True) if h == 0 and g > 0]
        for n in sorted(cuts, reverse=True):
            nbytes /= n
            written += nbytes
        written += (copies - len(cuts)) * self._goal_bytes
        local = copies * self._local_start + written / self._graph.costs.links.memory_bandwidth
        return min(local, collective + copies * self._copy)
