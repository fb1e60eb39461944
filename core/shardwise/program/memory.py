"""The cheapest solution within limits on memory, and a bound that says how far from the optimum it can be.

Every row of memory has a multiplier, a price per byte. With the prices in its costs a graph is solved as any other, and
its optimum less the price of the limits bounds the cost from below. For one row, the next price is the one at which the
cheapest solution over the limit and the cheapest within it are equal; this ends at the best price. For several rows the
prices follow the bytes over and under the limits (subgradient steps). At the end parts of the solutions over the limits
are taken into the one within them, where they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from attrs import frozen

from shardwise.program.cost_graph import FORBIDDEN, CostGraph, Costs
from shardwise.program.descent import relaxed_bound
from shardwise.program.elimination import LIMIT, solve
from shardwise.program.exchange import Exchange
from shardwise.program.memory_row import MemoryRow, check_rows, priced

__all__ = ["Bounded", "MemoryRow", "solve_within"]

_STEPS = 40  # prices that are tried; one row needs 5 to 15
_PATIENCE = 4  # steps without a better bound, after which the steps are halved


@frozen
class Bounded:
    """A solution, its cost, a proven lower bound on the cost within the limits, and whether it keeps them.

    ``feasible`` is False where no legal solution within the limits was found. For one row and proven solutions there is
    none then. The states are those with the least bytes, and ``bound`` still holds.
    """

    states: list[int]
    cost: int
    bound: int
    feasible: bool


def solve_within(
    graph: CostGraph, rows: Sequence[MemoryRow], limit: int = LIMIT, start: Sequence[int] | None = None
) -> Bounded:
    """The cheapest solution found within all rows; never worse than a ``start`` that is legal and within them."""
    check_rows(graph, rows)
    search = _Search(graph, rows, limit)
    if start is not None:
        search.offer(list(start))
    free = search.solved([Fraction(0)] * len(rows))
    if search.is_over(free):
        least = _least_bytes(graph, rows, limit)
        search.offer(least)
        if search.best is None:
            return Bounded(least, graph.cost(least), search.bound, feasible=False)
        if len(rows) == 1:
            _one_price(search, free, search.best)
        else:
            _several_prices(search, free)
    if search.best is None:
        return Bounded(free, graph.cost(free), search.bound, feasible=False)
    return Bounded(search.best, search.cost, min(search.bound, search.cost), feasible=True)


class _Search:
    """The best solution and the best bound so far."""

    def __init__(self, graph: CostGraph, rows: Sequence[MemoryRow], limit: int) -> None:
        self.graph = graph
        self.rows = rows
        self.best: list[int] | None = None
        self.cost = FORBIDDEN
        self.bound = 0
        self._limit = limit
        self._exchange = Exchange(graph, rows)

    def solved(self, multipliers: Sequence[Fraction]) -> list[int]:
        """The optimum under prices; it moves the bound, and the best solution by what it is or has parts of."""
        graph, within = priced(self.graph, self.rows, multipliers)
        states, cost, proven = solve(graph, self._limit)
        self.bound = max(self.bound, (cost if proven else relaxed_bound(graph, self._limit)) - within)
        self.offer(states)
        return states

    def is_over(self, states: Sequence[int]) -> bool:
        return not self._exchange.is_within(states)

    def excess(self, states: Sequence[int]) -> list[int]:
        return [int(nbytes) for nbytes in self._exchange.excess(states)]

    def offer(self, states: list[int]) -> None:
        """Keep a solution if it is the best; one over the limits may have parts for the best one."""
        if self.is_over(states):
            if self.best is None:
                return
            best = self.best
            self._keep(self._exchange.improved(best, states))
            repaired = self._exchange.repaired(states, best)
            if self.is_over(repaired):
                return
            states = repaired
        self._keep(self._exchange.polished(states))

    def _keep(self, states: list[int]) -> None:
        cost = self.graph.cost(states)
        if cost < self.cost:
            self.best, self.cost = states, cost


def _one_price(search: _Search, over: list[int], within: list[int]) -> None:
    """Prices at which a solution over the limit and one within it cost the same, until nothing lies between them."""
    row = search.rows[0]
    for _ in range(_STEPS):
        more = search.graph.cost(within) - search.graph.cost(over)
        fewer = row.total(over) - row.total(within)
        if more <= 0 or search.bound >= search.cost:
            return
        states = search.solved([Fraction(more, fewer)])
        if states in (over, within):
            return
        if search.is_over(states):
            over = states
        else:
            within = states


def _several_prices(search: _Search, states: list[int]) -> None:
    """Subgradient steps: a price rises with the bytes over its limit and falls with those under it."""
    scale = [max(1, row.limit) for row in search.rows]
    prices = [0.0] * len(scale)  # of a whole limit
    at_best, idle, length = prices, 0, 1.0
    for _ in range(_STEPS):
        if search.bound >= search.cost:
            return
        slope = [nbytes / n for nbytes, n in zip(search.excess(states), scale, strict=True)]
        step = length * (search.cost - search.bound) / max(sum(s * s for s in slope), 1e-9)
        prices = [max(0.0, price + step * s) for price, s in zip(prices, slope, strict=True)]
        before = search.bound
        states = search.solved([Fraction(price) / n for price, n in zip(prices, scale, strict=True)])
        if search.bound > before:
            at_best, idle = prices, 0
        else:
            idle += 1
            if idle == _PATIENCE:
                prices, idle, length = at_best, 0, length / 2


def _least_bytes(graph: CostGraph, rows: Sequence[MemoryRow], limit: int) -> list[int]:
    """A legal solution with the least bytes; of several rows those that are within lose weight."""
    known: dict[int, Costs] = {}

    def legal(costs: Costs) -> Costs:
        if id(costs) not in known:
            known[id(costs)] = np.where(costs >= FORBIDDEN, FORBIDDEN, 0)
        return known[id(costs)]

    free = CostGraph([legal(costs) for costs in graph.unary], [(u, v, legal(costs)) for u, v, costs in graph.pairs])
    exchange = Exchange(free, rows)
    # In parts of 2^36 of a limit, so that all rows together stay far below FORBIDDEN.
    weights = [Fraction(1 << 36, max(1, row.limit)) if len(rows) > 1 else Fraction(1) for row in rows]
    states: list[int] = []
    for _ in range(_STEPS if len(rows) > 1 else 1):
        states, _, _ = solve(priced(free, rows, weights)[0], limit)
        over = [nbytes > 0 for nbytes in exchange.excess(states).tolist()]
        if not any(over):
            break
        weights = [weight if more else weight / 2 for weight, more in zip(weights, over, strict=True)]
    return states
