"""In which order variables are eliminated: always the one whose elimination leaves the smallest table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush

from attrs import frozen

__all__ = ["Order", "elimination_order"]


@frozen(eq=False)
class Order:
    """Variables in the order of their elimination, and those that are to be fixed first (cut)."""

    variables: list[int]
    cut: list[int]
    largest: int


def elimination_order(
    sizes: Mapping[int, int],
    neighbours: Mapping[int, set[int]],
    limit: int,
    cut: Callable[[int, int, Mapping[int, set[int]]], int],
) -> Order:
    """An order in which no table has more than ``limit`` entries.

    The next variable is the one with the smallest table over its neighbours, and the lowest number among equals. When
    that table exceeds the limit, ``cut`` is called with the variable, the entries and the remaining graph. It gives a
    variable to fix, which leaves the graph, or raises.
    """
    left = {v: set(ends) for v, ends in neighbours.items()}
    entries = dict.fromkeys(left, 1)
    for v, ends in left.items():
        for u in ends:
            entries[v] *= sizes[u]
    heap = [(n, v) for v, n in entries.items()]
    heapify(heap)
    order = Order([], [], 1)
    largest = 1
    while heap:
        n, v = heappop(heap)
        if v not in left or entries[v] != n:
            continue  # an entry from before the neighbours of v changed
        if n > limit:
            heappush(heap, (n, v))
            w = cut(v, n, left)
            order.cut.append(w)
            for u in left.pop(w):
                left[u].remove(w)
                entries[u] //= sizes[w]
                heappush(heap, (entries[u], u))
            continue
        order.variables.append(v)
        largest = max(largest, n)
        ends = left.pop(v)
        for u in ends:
            others = left[u]
            others.remove(v)
            entries[u] //= sizes[v]
            for w in ends - others:
                if w != u:
                    others.add(w)
                    entries[u] *= sizes[w]
            heappush(heap, (entries[u], u))
    return Order(order.variables, order.cut, largest)
