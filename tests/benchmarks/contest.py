"""The public instances of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism, and a search on them.

An instance is a JSON file, or the same with gzip: nodes with intervals, costs and usages per strategy, edges with costs
per pair of strategies, and one limit on the usage at every moment. A moment is a memory row here; there are up to
59,000 of them, so prices are kept per moment and summed over a node's interval.
"""

import csv
import gzip
import json
from collections import Counter

import numpy as np
from attrs import frozen

from shardwise.program.array_cache import ArrayCache
from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.descent import first_states, least_cut
from shardwise.program.elimination_order import elimination_order
from shardwise.program.network import Network

TABLE, FINE_TABLE = 1 << 12, 1 << 16
SMALL = 5_000  # variables; graphs with fewer afford the larger tables
STEADY = 60  # rounds after which prices follow at half the pace
FREE_ROUNDS = 3
FILLED = 0.99  # of the limit is what prices aim at


@frozen(eq=False)
class Instance:
    name: str
    graph: CostGraph
    first: np.ndarray  # flattened strategies: where those of a node begin
    usage: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    limit: int

    def profile(self, states):
        """The usage at every moment."""
        used = self.usage[self.first[:-1] + states]
        change = np.zeros(int(self.end.max()) + 1, np.int64)
        np.add.at(change, self.begin, used)
        np.subtract.at(change, self.end, used)
        return np.cumsum(change)[:-1]


def read(path):
    text = path.read_bytes()
    problem = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    known = {}

    def table(costs, shape):
        array = np.minimum(np.array(costs, np.int64), FORBIDDEN).reshape(shape)
        return known.setdefault((shape, array.tobytes()), array)

    unary = [table(costs, (len(costs),)) for costs in nodes["costs"]]
    pairs = [
        (u, v, table(costs, (len(unary[u]), len(unary[v]))))
        for (u, v), costs in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    intervals = np.array(nodes["intervals"], np.int64)
    empty = intervals[:, 1] <= intervals[:, 0]
    usage = np.concatenate([np.array(u, np.int64) for u in nodes["usages"]])
    first = np.concatenate([[0], np.cumsum([len(costs) for costs in unary])])
    usage[np.repeat(empty, np.diff(first))] = 0
    limit = problem.get("usage_limit", int(usage.sum()))
    # A strategy that does not fit alone is not legal; this also takes the usages that stand for infinity.
    for v in np.unique(np.searchsorted(first, np.flatnonzero(usage > limit), "right") - 1):
        here = usage[first[v] : first[v + 1]]
        unary[v] = np.where(here > limit, FORBIDDEN, unary[v])
    return Instance(
        problem["name"],
        CostGraph(unary, pairs),
        first,
        np.minimum(usage, limit),
        intervals[:, 0],
        intervals[:, 1],
        limit,
    )


def best_known(folder):
    """By the letter of an instance, the least cost of any team, where the contest's file of results is there."""
    path = folder / "best.csv"
    if not path.exists():
        return {}
    best = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for name, cost in row.items():
                if name != "TEAM #" and cost:
                    best[name] = min(best.get(name, int(cost)), int(cost))
    return best


class Search:
    """Rounds of descent on a graph with a price per moment; the cheapest solution within the limit is kept.

    The first rounds go without prices. Then every moment over the limit has a price, and after each round the price
    follows the usage: it grows by the ratio of usage and limit, and falls by it where there is room.
    """

    def __init__(self, instance):
        self.instance = instance
        self.network = Network.of(instance.graph)
        self.states = np.array(first_states(self.network, len(instance.graph.unary), TABLE))
        self.table = FINE_TABLE if len(self.network.unary) < SMALL else TABLE
        self.times_cut = Counter()
        self.prices = np.zeros(int(instance.end.max()))
        self.best = self.cost = None
        self.rounds = 0

    def run(self, done):
        """Rounds until ``done()``, and at least one."""
        while self.rounds == 0 or not done():
            self._round()
            self.rounds += 1
            cost = self.instance.graph.cost(self.states.tolist())
            ratio = self.instance.profile(self.states) / self.instance.limit
            if ratio.max() <= 1 and (self.best is None or cost < self.cost):
                self.best, self.cost = self.states.copy(), cost
            self._follow(cost, ratio)

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
        price = np.minimum(i.usage * np.repeat(per_node, np.diff(i.first)), FORBIDDEN / 4).astype(np.int64)
        unary = {
            v: np.minimum(costs + price[i.first[v] : i.first[v + 1]], FORBIDDEN)
            for v, costs in self.network.unary.items()
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
