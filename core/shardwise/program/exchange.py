"""Small changes of a solution within memory limits: parts of another solution, and single variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwise.program.cost_graph import CostGraph, Costs
from shardwise.program.memory_row import MemoryRow

__all__ = ["Exchange"]

_PASSES = 4  # over all variables; the first one finds nearly everything


class Exchange:
    """Cost and bytes of changes, and greedy choices among them."""

    def __init__(self, graph: CostGraph, rows: Sequence[MemoryRow]) -> None:
        self._graph = graph
        self._limits = np.array([row.limit for row in rows], np.int64)
        self._ends: list[list[tuple[int, Costs]]] = [[] for _ in graph.unary]
        for u, v, costs in graph.pairs:
            self._ends[u].append((v, costs))
            self._ends[v].append((u, costs.T))
        self._nbytes: dict[int, list[tuple[int, Costs]]] = {}
        for i, row in enumerate(rows):
            for v, nbytes in row.nbytes.items():
                self._nbytes.setdefault(v, []).append((i, nbytes))

    def excess(self, states: Sequence[int]) -> Costs:
        """By row, the bytes over the limit; what is below is negative."""
        return self._bytes(dict(enumerate(states))) - self._limits

    def is_within(self, states: Sequence[int]) -> bool:
        return not bool((self.excess(states) > 0).any())

    def improved(self, states: Sequence[int], other: Sequence[int]) -> list[int]:
        """A solution within the limits, with those parts of ``other`` that are cheaper and fit, most saving first.

        A part is a connected piece of the graph in which the two solutions differ; the costs of parts are independent.
        """
        now = list(states)
        excess = self.excess(now)
        parts = sorted((self._change(now, part), i, part) for i, part in enumerate(self._parts(now, other)))
        for cost, _, part in parts:
            after = excess + self._bytes(part) - self._bytes({v: now[v] for v in part})
            if cost < 0 and not (after > 0).any():
                excess = after
                for v, state in part.items():
                    now[v] = state
        return self.polished(now)

    def repaired(self, states: Sequence[int], other: Sequence[int]) -> list[int]:
        """A solution over the limits with parts of one within them, cheapest per byte first, until it is within."""
        now = list(states)
        excess = self.excess(now)
        parts = []
        for i, part in enumerate(self._parts(now, other)):
            nbytes = self._bytes(part) - self._bytes({v: now[v] for v in part})
            saved = int(np.maximum(excess, 0).sum() - np.maximum(excess + nbytes, 0).sum())
            if saved > 0:
                parts.append((self._change(now, part) / saved, i, part, nbytes))
        for _, _, part, nbytes in sorted(parts, key=lambda each: each[:2]):
            if not (excess > 0).any():
                break
            excess = excess + nbytes
            for v, state in part.items():
                now[v] = state
        return now

    def polished(self, states: Sequence[int]) -> list[int]:
        """A solution within the limits, in which no change of one variable is cheaper and fits."""
        now = list(states)
        excess = self.excess(now)
        for _ in range(_PASSES):
            before = list(now)
            for v, unary in enumerate(self._graph.unary):
                if len(unary) == 1:
                    continue
                costs = unary.copy()
                for u, table in self._ends[v]:
                    costs += table[:, now[u]]
                cheaper = np.flatnonzero(costs < costs[now[v]])
                for state in cheaper[np.argsort(costs[cheaper], kind="stable")].tolist():
                    after = excess + self._bytes({v: state}) - self._bytes({v: now[v]})
                    if not (after > 0).any():
                        excess, now[v] = after, state
                        break
            if now == before:
                break
        return now

    def _parts(self, states: Sequence[int], other: Sequence[int]) -> list[dict[int, int]]:
        """The connected pieces of the variables that differ, with their states in ``other``."""
        left = {v for v, (a, b) in enumerate(zip(states, other, strict=True)) if a != b}
        parts = []
        for first in sorted(left):
            if first not in left:
                continue
            left.remove(first)
            piece = [first]
            for v in piece:
                for u, _ in self._ends[v]:
                    if u in left:
                        left.remove(u)
                        piece.append(u)
            parts.append({v: other[v] for v in sorted(piece)})
        return parts

    def _change(self, states: Sequence[int], part: Mapping[int, int]) -> int:
        """What the cost grows by when a part changes its states."""
        total = 0
        for v, new in part.items():
            total += int(self._graph.unary[v][new]) - int(self._graph.unary[v][states[v]])
            for u, costs in self._ends[v]:
                if u not in part or v < u:
                    total += int(costs[new, part.get(u, states[u])]) - int(costs[states[v], states[u]])
        return total

    def _bytes(self, states: Mapping[int, int]) -> Costs:
        total = np.zeros(len(self._limits), np.int64)
        for v, state in states.items():
            for i, nbytes in self._nbytes.get(v, ()):
                total[i] += nbytes[state]
        return total
