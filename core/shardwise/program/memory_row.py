"""A limit on the bytes that the states of some variables take together, and prices for such bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np
from attrs import field, frozen

from shardwise.program.cost_graph import FORBIDDEN, CostGraph, Costs
from shardwise.program.errors import CostGraphError

__all__ = ["MemoryRow", "check_rows", "priced"]

_BITS = 61  # of a product of bytes and a multiplier


@frozen(eq=False)
class MemoryRow:
    """The sum of the bytes of some variables is at most ``limit``.

    ``nbytes`` has, by variable, the bytes per state: int64 [states], not negative.
    """

    limit: int
    nbytes: Mapping[int, Costs] = field(converter=dict)

    def total(self, states: Sequence[int]) -> int:
        return sum(int(nbytes[states[v]]) for v, nbytes in self.nbytes.items())

    @property
    def least(self) -> int:
        """A lower bound on the bytes: every variable has its smallest state."""
        return sum(int(nbytes.min()) for nbytes in self.nbytes.values())


def check_rows(graph: CostGraph, rows: Iterable[MemoryRow]) -> None:
    """Refuse rows that do not fit a graph."""
    for i, row in enumerate(rows):
        for v, nbytes in row.nbytes.items():
            if not 0 <= v < len(graph.unary) or nbytes.shape != graph.unary[v].shape:
                raise CostGraphError(f"memory row {i}: the bytes of variable {v} do not fit the states of the graph")
            if nbytes.dtype != np.int64 or nbytes.min() < 0:
                raise CostGraphError(f"memory row {i}: the bytes of variable {v} are not int64 from 0 on")


def priced(graph: CostGraph, rows: Sequence[MemoryRow], multipliers: Sequence[Fraction]) -> tuple[CostGraph, int]:
    """The graph with a price on each byte, and the price of all bytes within the limits.

    The optimum of this graph less that second figure is a lower bound on the cost within the limits: prices are
    rounded down state by state, so a solution within the limits never pays more than the price of the limits. Bytes
    that every state takes are left out of both.
    """
    unary = list(graph.unary)
    within = 0
    for row, multiplier in zip(rows, multipliers, strict=True):
        if multiplier <= 0:
            continue
        most = max((int(nbytes.max() - nbytes.min()) for nbytes in row.nbytes.values()), default=0)
        bits = _BITS - most.bit_length()
        shift = min(62, max(0, bits - 1 - multiplier.numerator.bit_length() + multiplier.denominator.bit_length()))
        factor = min((1 << bits) - 1, (multiplier.numerator << shift) // multiplier.denominator)
        within += (factor * (row.limit - row.least)) >> shift
        for v, nbytes in row.nbytes.items():
            price = ((nbytes - nbytes.min()) * factor) >> shift
            unary[v] = np.minimum(unary[v] + np.minimum(price, FORBIDDEN), FORBIDDEN)
    return CostGraph(unary, graph.pairs), within
