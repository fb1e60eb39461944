"""The optimum of a cost graph, by eliminating one variable after the other.

Eliminating a variable replaces it and its tables by one table over its neighbours: the least cost that it adds, for
every combination of their states. This is exact, and cheap where the tables stay small, as in chains with skip links.

Example: in a -- b -- c, eliminating b leaves a table over (a, c), and eliminating a one over c. The least entry there
is the optimum; going back gives the states of a and b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from shardwise.program.array_cache import ArrayCache
from shardwise.program.cost_graph import CostGraph
from shardwise.program.descent import descend
from shardwise.program.elimination_order import Order, elimination_order
from shardwise.program.errors import TableLimitError
from shardwise.program.network import Network

__all__ = ["LIMIT", "eliminate", "solve"]

LIMIT = 30_000_000
"""Entries of the largest table: 240 MB of costs and 60 MB of choices."""


def eliminate(graph: CostGraph, limit: int = LIMIT) -> tuple[list[int], int]:
    """The optimum: a state per variable, and the cost. A table over the limit is a :class:`TableLimitError`.

    Among equal costs, each variable takes the lowest state that is optimal together with the states of the variables
    that are eliminated after it. The order of elimination depends on the numbers of states and on the pairs only.
    """
    network = Network.of(graph)
    return _eliminated(graph, network, _exact_order(network, limit))


def solve(
    graph: CostGraph, limit: int = LIMIT, start: Sequence[int] | None = None, cache: ArrayCache | None = None
) -> tuple[list[int], int, bool]:
    """A good solution, never worse than ``start``: states, cost, and whether it is proven to be the optimum.

    Where elimination needs tables over the limit, some variables are fixed in turns (see
    :mod:`shardwise.program.descent`). With a ``cache`` of earlier solutions only what has changed is computed.
    """
    network = Network.of(graph, cache)
    try:
        order = _exact_order(network, limit)
    except TableLimitError:
        states = descend(graph, network, limit, start)
        cost = graph.cost(states)
        proven = cost == 0
    else:
        states, cost = _eliminated(graph, network, order)
        proven = True
    assert start is None or cost <= graph.cost(start), "a solution is never worse than its start"
    return states, cost, proven


def _exact_order(network: Network, limit: int) -> Order:
    def refuse(variable: int, entries: int, _: Mapping[int, set[int]]) -> NoReturn:
        raise TableLimitError(variable, entries, limit)

    orders = network.cache.orders
    key = (limit, tuple(network.sizes.items()), tuple(network.tables))
    if key not in orders:
        orders[key] = elimination_order(network.sizes, network.neighbours, limit, refuse)
    order: Order = orders[key]
    return order


def _eliminated(graph: CostGraph, network: Network, order: Order) -> tuple[list[int], int]:
    chosen = network.eliminated(order.variables)
    states = [chosen.get(v, 0) for v in range(len(graph.unary))]
    return states, graph.cost(states)
