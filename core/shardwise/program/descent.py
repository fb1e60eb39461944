"""Descent over blocks of variables, where the graph is too wide for elimination.

A few variables, the cut, keep the states that they have, and all others are solved exactly. This repeats with other
cuts until nothing improves. The cuts begin small tables, which are quick, and go on with larger ones, which move more
variables together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.elimination_order import Order, elimination_order
from shardwise.program.network import Network

__all__ = ["descend", "relaxed_bound"]

_TABLES = (1 << 12, 1 << 15, 1 << 18)  # entries: milliseconds, and what a second of work pays for
_IDLE_ROUNDS = 4  # cuts of one size that are tried without any gain; each avoids what the others fixed


def descend(graph: CostGraph, network: Network, limit: int, start: Sequence[int] | None) -> list[int]:
    """States that no round improves, at most as expensive as ``start``."""
    best = list(start) if start is not None else first_states(network, len(graph.unary), min(limit, _TABLES[0]))
    cost = graph.cost(best)
    times_cut: Counter[int] = Counter()
    for entries in sorted({min(limit, n) for n in _TABLES}):
        idle = 0
        while idle < _IDLE_ROUNDS and cost:
            order = elimination_order(network.sizes, network.neighbours, entries, least_cut(times_cut))
            times_cut.update(order.cut)
            states = list(best)
            for v, state in network.fixed({v: best[v] for v in order.cut}).eliminated(order.variables).items():
                states[v] = state
            new = graph.cost(states)
            idle = 0 if new < cost else idle + 1
            if new <= cost:
                best, cost = states, new
    return best


def least_cut(times_cut: Mapping[int, int]) -> Callable[[int, int, Mapping[int, set[int]]], int]:
    """Fixes, of a variable and its neighbours, the one with many neighbours that was fixed the least often before."""

    def cut(variable: int, _: int, left: Mapping[int, set[int]]) -> int:
        return max(sorted({variable, *left[variable]}), key=lambda v: (len(left[v]) << 10) // (1 + times_cut.get(v, 0)))

    return cut


def first_states(network: Network, variables: int, entries: int) -> list[int]:
    """Where a descent starts without a solution: what is cut chooses last."""
    rest, order, _ = without_cut(network, entries)
    states = rest.eliminated(order.variables)
    for v in order.cut:
        costs = network.unary[v]
        for u in sorted(network.neighbours[v] & states.keys()):
            costs = network.cache.added(costs, network.cache.column(network.table(v, u), states[u]))
        states[v] = int(np.argmin(costs))
    return [states.get(v, 0) for v in range(variables)]


def relaxed_bound(graph: CostGraph, limit: int) -> int:
    """A lower bound on the cost of a graph: every neighbour of a cut variable may think that it has another state."""
    rest, order, apart = without_cut(Network.of(graph), min(limit, _TABLES[-1]))
    return min(apart + rest.cost(rest.eliminated(order.variables)), FORBIDDEN)


def without_cut(network: Network, entries: int) -> tuple[Network, Order, int]:
    """The network without a cut, the order of the rest, and the least that the cut costs apart from the rest.

    A variable of the cut has, for each neighbour alone, the state that is cheapest for that neighbour.
    """
    order = elimination_order(network.sizes, network.neighbours, entries, least_cut({}))
    cut = set(order.cut)
    unary = {v: costs for v, costs in network.unary.items() if v not in cut}
    apart = sum(int(network.unary[v].min()) for v in order.cut)
    for v in order.cut:
        for u in sorted(network.neighbours[v]):
            if u in unary:
                shape = (len(network.unary[v]), len(unary[u]))
                least, _ = network.cache.minimum([network.table(v, u)], ((0, 1),), shape)
                unary[u] = network.cache.added(unary[u], least)
            elif v < u:
                apart += int(network.tables[v, u].min())
    tables = {pair: costs for pair, costs in network.tables.items() if not cut.intersection(pair)}
    return Network(unary, tables, {v: network.neighbours[v] - cut for v in unary}, network.cache), order, apart
