"""A search on the contest's instances: descent with a price per moment, and single groups that move within the limit.

A moment is a memory row here; there are up to 59,000 of them, so prices are kept per moment and summed over a node's
interval.
"""

from collections import Counter

import numpy as np
from contest_moves import Moves

from shardwise.program.array_cache import ArrayCache
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.descent import first_states, least_cut
from shardwise.program.elimination_order import elimination_order
from shardwise.program.network import Network

TABLE, FINE_TABLE, LARGEST_TABLE = 1 << 12, 1 << 16, 1 << 20
IDLE = 30  # rounds without a better solution, after which tables are larger: more groups then change together
SMALL = 5_000  # variables; graphs with fewer afford the larger tables
STEADY = 60  # rounds after which prices follow at half the pace
FREE_ROUNDS = 3
FILLED = 0.99  # of the limit is what prices aim at


class Search:
    """Rounds of descent on a graph with a price per moment; the cheapest solution within the limit is kept.

    The first rounds go without prices. Then every moment over the limit has a price, and after each round the price
    follows the usage: it grows by the ratio of usage and limit, and falls by it where there is room. What a round finds
    is moved into the limit, and made cheaper within it, group by group.
    """

    def __init__(self, instance):
        self.instance = instance
        self.network = Network.of(instance.graph)
        self.moves = Moves(instance)
        self.states = np.array(first_states(self.network, len(instance.graph.unary), TABLE))
        self.table = FINE_TABLE if len(self.network.unary) < SMALL else TABLE
        self.times_cut = Counter()
        self.prices = np.zeros(int(instance.end.max()))
        self.best = self.cost = None
        self.rounds = self.idle = 0

    def run(self, done):
        """Rounds until ``done()``, and at least one."""
        while self.rounds == 0 or not done():
            self._round()
            self.rounds += 1
            cost = self.instance.graph.cost(self.states.tolist())
            ratio = self.instance.profile(self.states) / self.instance.limit
            self.idle = 0 if self._offer(done) else self.idle + 1
            if self.idle == IDLE:
                self.idle, self.table = 0, min(4 * self.table, LARGEST_TABLE)
            self._follow(cost, ratio)

    def _offer(self, done):
        """Whether the states, moved into the limit, are the best so far."""
        within = self.moves.within(self.states, done)
        if within is not None:
            states = self.moves.polish(within, done)
            cost = self.instance.checked(states)
            if cost is not None and (self.best is None or cost < self.cost):
                self.best, self.cost = states, cost
                return True
        return False

    def _round(self):
        priced = self._priced()
        order = elimination_order(priced.sizes, priced.neighbours, self.table, least_cut(self.times_cut))
        self.times_cut.update(order.cut)
        fixed = {v: int(self.states[v]) for v in order.cut}
        for v, state in priced.fixed(fixed).eliminated(order.variables).items():
            self.states[v] = state

    def _priced(self):
        i = self.instance
        along = np.concatenate([[0.0], np.cumsum(self.prices)])
        per_node = along[i.end] - along[np.minimum(i.begin, i.end)]
        price = np.minimum(self.moves.held(per_node), FORBIDDEN / 4).astype(np.int64)
        first = self.moves.first
        unary = {
            v: np.minimum(costs + price[first[v] : first[v + 1]], FORBIDDEN) for v, costs in self.network.unary.items()
        }
        # What a cache keeps of one round's prices is of no use in the next.
        return Network(unary, self.network.tables, self.network.neighbours, ArrayCache())

    def _follow(self, cost, ratio):
        over = ratio > 1
        if self.rounds == FREE_ROUNDS:
            self.prices = np.where(over, cost / self.instance.limit / max(1, over.sum()), 0.0)
        elif self.rounds > FREE_ROUNDS:
            least = self.prices.max() / 1000 or cost / self.instance.limit / len(ratio)
            prices = np.maximum(self.prices, np.where(over, least, 0.0))
            self.prices = prices * np.clip(ratio / FILLED, 0.5, 2.0) ** (1 / (1 + self.rounds / STEADY))
