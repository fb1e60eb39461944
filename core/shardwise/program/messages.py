"""A lower bound on the cost of a graph of variables and pairs, by messages along the pairs.

Any messages give a bound:

    cost >= sum over variables of the least (own costs + messages to it)
          + sum over pairs of the least (costs of the pair - the messages to both ends)

Sweeps through the variables, forth and back, make it better: each variable takes what its pairs cost at least in each
of its states, and hands equal parts of the sum to the pairs ahead. That is sequential tree-reweighted message passing;
what it approaches is the linear program over single variables and pairs. On a tree that is the optimum.

All variables of a class of a folded graph have the same messages. Where pairs of several kinds of ends share a slot,
the most frequent one has its way: a message that is wrong for a few pairs costs little, and the bound still holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from shardwise.program.folded_graph import FoldedGraph

__all__ = ["Cells", "Floats", "Indices", "Messages", "PairTable"]

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@frozen(eq=False)
class Cells:
    """The cell of each state of a variable: what a kind of pair can tell apart, a layout of a tensor for instance."""

    of: Indices
    count: int
    _order: Indices = field(init=False)
    _starts: Indices = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_order", np.argsort(self.of, kind="stable"))
        object.__setattr__(self, "_starts", np.searchsorted(self.of[self._order], np.arange(self.count)))

    def least(self, costs: Floats) -> Floats:
        """The least cost of the states of each cell."""
        least: Floats = np.minimum.reduceat(costs[self._order], self._starts)
        return least


@define(eq=False)
class PairTable:
    """The costs of a kind of pair, by cells of both ends. Every cell has a state."""

    costs: Floats
    ends: tuple[Cells, Cells]
    _turned: Floats = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._turned = np.ascontiguousarray(self.costs.T)

    def raise_to(self, cells: tuple[int, int], cost: float) -> bool:
        """Raise the cost of two cells; whether it was lower."""
        if cost <= self.costs[cells]:
            return False
        self.costs[cells] = self._turned[cells[::-1]] = cost
        return True

    def seen_from(self, end: int) -> Floats:
        """The costs with the cells of an end in rows."""
        return self._turned if end else self.costs

    def least(self, end: int, other: Floats) -> Floats:
        """By cell of one end, the least cost of the pair less the messages to the other end."""
        least: Floats = (self.seen_from(end) - other).min(axis=1)
        return least


@define(eq=False)
class Messages:
    """Messages over a folded graph. ``unary`` are the costs by class, ``tables`` those by kind of pair, and
    ``positions`` say by class which comes first.
    """

    graph: FoldedGraph
    unary: Sequence[Floats]
    tables: Mapping[int, PairTable]
    positions: Sequence[float]
    _messages: list[list[Floats]] = field(init=False)
    _order: list[int] = field(init=False)
    #: By class and slot, the class and slot at the other end of the most frequent pair there.
    _other: list[list[tuple[int, int]]] = field(init=False)
    #: By class, the slots of pairs to later classes, and to earlier ones.
    _ahead: list[tuple[list[int], list[int]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        slots = self.graph.slots
        self._messages = [[np.zeros(self.tables[kind].ends[end].count) for kind, end in of] for of in slots]
        self._order = sorted(range(len(slots)), key=lambda c: (self.positions[c], c))
        rank = {c: k for k, c in enumerate(self._order)}
        most = [[0] * len(of) for of in slots]
        self._other = [[(-1, -1)] * len(of) for of in slots]
        for (_, u, a, v, b), count in sorted(self.graph.counts.items()):
            for c, slot, other in ((u, a, (v, b)), (v, b, (u, a))):
                if count > most[c][slot]:
                    most[c][slot], self._other[c][slot] = count, other
        self._ahead = []
        for c, others in enumerate(self._other):
            later = [s for s, (o, _) in enumerate(others) if rank[o] > rank[c]]
            self._ahead.append((later, [s for s in range(len(others)) if s not in later]))

    def sweep(self) -> None:
        """Go through all classes, forth and back."""
        for c in self._order:
            self._pass_on(c, 0)
        for c in reversed(self._order):
            self._pass_on(c, 1)

    def _pass_on(self, c: int, way: int) -> None:
        """Take what the pairs of a class cost at least, and hand parts of it to those that come next."""
        mine, slots = self._messages[c], self.graph.slots[c]
        total = self.unary[c].copy()
        for s, (kind, end) in enumerate(slots):
            table, (other, slot) = self.tables[kind], self._other[c][s]
            least = table.least(end, self._messages[other][slot])
            mine[s] = least - least.min()
            total += mine[s][table.ends[end].of]
        total -= total.min()
        next_ones = self._ahead[c][way]
        parts = max(len(next_ones), len(slots) - len(next_ones))
        for given, s in enumerate(next_ones):
            kind, end = slots[s]
            cells = self.tables[kind].ends[end]
            part = cells.least(total) / (parts - given)
            total -= part[cells.of]
            mine[s] = mine[s] - part

    def bound(self) -> float:
        """The bound of the messages as they are."""
        total = 0.0
        for c, members in enumerate(self.graph.members):
            costs = self.unary[c].copy()
            for (kind, end), message in zip(self.graph.slots[c], self._messages[c], strict=True):
                costs += message[self.tables[kind].ends[end].of]
            total += len(members) * float(costs.min())
        for (kind, u, a, v, b), count in self.graph.counts.items():
            least = self.tables[kind].least(0, self._messages[v][b]) - self._messages[u][a]
            total += count * float(least.min())
        return total

    def cheapest_beside(
        self, kind: int, cells: tuple[int, int], first: tuple[int, int], second: tuple[int, int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """The cells of a pair that are cheapest by the messages with that of one end, and with that of the other.

        ``first`` and ``second`` are the class and slot of its ends.
        """
        (i, j), table = cells, self.tables[kind]
        (u, a), (v, b) = first, second
        column = int((table.seen_from(0)[i] - self._messages[v][b]).argmin())
        return (i, column), (int((table.seen_from(1)[j] - self._messages[u][a]).argmin()), j)

    def chosen(self) -> list[int]:
        """A state by class: each the cheapest beside the classes before it, and by the messages of those after it."""
        states: dict[int, int] = {}
        for c in self._order:
            costs = self.unary[c].copy()
            for (kind, end), message, (other, _) in zip(
                self.graph.slots[c], self._messages[c], self._other[c], strict=True
            ):
                table = self.tables[kind]
                here = message
                if other in states:
                    here = table.seen_from(end)[:, table.ends[1 - end].of[states[other]]]
                costs += here[table.ends[end].of]
            states[c] = int(costs.argmin())
        return [states[c] for c in range(len(self.unary))]
