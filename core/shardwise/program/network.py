"""A cost graph as the solvers want it: one table per two variables, and no variable that has a single state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from shardwise.program.array_cache import ArrayCache
from shardwise.program.cost_graph import CostGraph, Costs

__all__ = ["Network", "merged_tables"]


@frozen(eq=False)
class _Step:
    """The elimination of a variable: the tables that it is in, the axis of each of their dims, and the numbers of
    states of the variable and of its neighbours then.
    """

    variable: int
    others: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]


@frozen(eq=False)
class Network:
    """Unary costs of the variables that are left, one table per pair (u < v), and the neighbours."""

    unary: dict[int, Costs]
    tables: dict[tuple[int, int], Costs]
    neighbours: dict[int, set[int]]
    cache: ArrayCache

    @classmethod
    def of(cls, graph: CostGraph, cache: ArrayCache | None = None) -> Network:
        cache = cache or ArrayCache()
        unary = {v: cache.snapshot(costs) for v, costs in enumerate(graph.unary)}
        tables = merged_tables(graph, cache)
        neighbours: dict[int, set[int]] = {v: set() for v in unary}
        for u, v in tables:
            neighbours[u].add(v)
            neighbours[v].add(u)
        # A single state is no choice, and its elimination would tie all its neighbours together.
        return cls(unary, tables, neighbours, cache).fixed({v: 0 for v, costs in unary.items() if len(costs) == 1})

    def table(self, u: int, v: int) -> Costs:
        """The costs [states of u, states of v] of two neighbours."""
        return self.tables[u, v] if u < v else self.cache.transposed(self.tables[v, u])

    def fixed(self, states: Mapping[int, int]) -> Network:
        """What remains when some variables have a state: their tables become costs of their neighbours.

        The costs between fixed variables, and their own, are left out.
        """
        cache = self.cache
        unary = {v: costs for v, costs in self.unary.items() if v not in states}
        gone = set(states)
        neighbours = {v: self.neighbours[v] - gone for v in unary}
        for u in sorted(states):
            for v in sorted(self.neighbours[u]):
                if v in unary:
                    costs = (
                        cache.row(self.tables[u, v], states[u]) if u < v else cache.column(self.tables[v, u], states[u])
                    )
                    unary[v] = cache.added(unary[v], costs)
        tables = {pair: costs for pair, costs in self.tables.items() if pair[0] in unary and pair[1] in unary}
        return Network(unary, tables, neighbours, cache)

    @property
    def sizes(self) -> dict[int, int]:
        return {v: len(costs) for v, costs in self.unary.items()}

    def cost(self, states: Mapping[int, int]) -> int:
        """The sum of the costs of what is left."""
        total = sum(int(costs[states[v]]) for v, costs in self.unary.items())
        return total + sum(int(costs[states[u], states[v]]) for (u, v), costs in self.tables.items())

    def eliminated(self, order: Sequence[int]) -> dict[int, int]:
        """The optimal states, by eliminating the variables in an order.

        Each variable takes the lowest state that is optimal together with the states of the variables that are
        eliminated after it.
        """
        unary = dict(self.unary)
        tables: dict[tuple[int, ...], Costs] = dict(self.tables.items())
        steps = self._steps(order)
        choices = []
        for step in steps:
            costs = [unary.pop(step.variable), *map(tables.pop, step.scopes)]
            least, choice = self.cache.minimum(costs, step.axes, step.shape)
            choices.append(choice)
            scope = step.others
            if len(scope) == 1:
                unary[scope[0]] = self.cache.added(unary[scope[0]], least)
            elif scope:
                tables[scope] = self.cache.added(tables[scope], least) if scope in tables else least
        states: dict[int, int] = {}
        for step, choice in zip(reversed(steps), reversed(choices), strict=True):
            states[step.variable] = int(choice[tuple([states[u] for u in step.others])])
        return states

    def _steps(self, order: Sequence[int]) -> list[_Step]:
        """What is done with each variable of an order: it depends on the numbers of states and on the pairs only."""
        sizes = self.sizes
        key = ("steps", tuple(order), tuple(sizes.items()), tuple(self.tables))
        known: list[_Step] | None = self.cache.orders.get(key)
        if known is not None:
            return known
        scopes: dict[int, set[tuple[int, ...]]] = {v: set() for v in sizes}
        for scope in self.tables:
            for v in scope:
                scopes[v].add(scope)
        steps = []
        for v in order:
            mine = sorted(scopes.pop(v))
            others = tuple(sorted({u for scope in mine for u in scope if u != v}))
            axis = {u: i + 1 for i, u in enumerate(others)}
            axis[v] = 0
            axes = ((0,), *(tuple(axis[u] for u in scope) for scope in mine))
            steps.append(_Step(v, others, tuple(mine), axes, (sizes[v], *(sizes[u] for u in others))))
            for u in others:
                scopes[u].difference_update(mine)
                if len(others) > 1:
                    scopes[u].add(others)
        self.cache.orders[key] = steps
        return steps


def merged_tables(graph: CostGraph, cache: ArrayCache | None = None) -> dict[tuple[int, int], Costs]:
    """The costs of pairs, by (u, v) with u < v; those of parallel pairs are added."""
    cache = cache or ArrayCache()
    tables: dict[tuple[int, int], Costs] = {}
    still: dict[int, Costs] = {}
    for u, v, given in graph.pairs:
        if id(given) not in still:
            still[id(given)] = cache.snapshot(given)
        costs = still[id(given)] if u < v else cache.transposed(still[id(given)])
        pair = (u, v) if u < v else (v, u)
        tables[pair] = cache.added(tables[pair], costs) if pair in tables else costs
    return tables
