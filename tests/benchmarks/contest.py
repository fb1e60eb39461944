"""The public instances of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism.

An instance is a JSON file, or the same with gzip: nodes with intervals, costs and usages per strategy, edges with costs
per pair of strategies, and one limit on the usage at every moment. Two thirds of the edges only say that two nodes have
matching strategies. Nodes that such edges join are one group here, with a state for each legal combination.
"""

import csv
import gzip
import json

import numpy as np
from attrs import frozen

from shardwise.program.cost_graph import FORBIDDEN, CostGraph

ILLEGAL = FORBIDDEN >> 6
"""What a combination that is not legal costs: far less than the most, so that a search sees how many there are."""


@frozen(eq=False)
class Instance:
    """Groups of nodes: their costs by state, and what each node uses in each state of its group."""

    name: str
    graph: CostGraph
    #: The same by nodes and strategies, as the file has it.
    nodes: CostGraph
    group: np.ndarray  # of each node
    strategies: list  # per node: its strategy by the state of its group
    offset: np.ndarray  # of each node, where in ``usage`` the states of its group begin
    usage: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    limit: int

    def profile(self, states):
        """The usage at every moment, from the states of the groups."""
        used = self.usage[self.offset + states[self.group]]
        change = np.zeros(int(self.end.max()) + 1, np.int64)
        np.add.at(change, self.begin, used)
        np.subtract.at(change, self.end, used)
        return np.cumsum(change)[:-1]

    def by_node(self, states):
        """The strategy of every node."""
        return [int(own[states[g]]) for own, g in zip(self.strategies, self.group.tolist(), strict=True)]

    def checked(self, states):
        """The cost of states, node by node and edge by edge as the file has them; None unless they are legal."""
        each = self.by_node(states)
        costs = [int(own[s]) for own, s in zip(self.nodes.unary, each, strict=True)]
        costs += [int(table[each[u], each[v]]) for u, v, table in self.nodes.pairs]
        legal = max(costs) < ILLEGAL and self.profile(states).max() <= self.limit
        return sum(costs) if legal else None


def read(path):
    text = path.read_bytes()
    problem = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    known = {}

    def table(costs, shape):
        array = np.array(costs, np.int64).reshape(shape)
        array[array >= FORBIDDEN] = ILLEGAL
        return known.setdefault((shape, array.tobytes()), array)

    unary = [table(costs, (len(costs),)) for costs in nodes["costs"]]
    pairs = [
        (u, v, table(costs, (len(unary[u]), len(unary[v]))))
        for (u, v), costs in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    intervals = np.array(nodes["intervals"], np.int64)
    never = intervals[:, 1] <= intervals[:, 0]
    usage = [np.array(used, np.int64) for used in nodes["usages"]]
    limit = problem.get("usage_limit", sum(int(used.max()) for used in usage))
    for v, used in enumerate(usage):
        if never[v]:
            used[:] = 0
        elif used.max() > limit:
            # A strategy that does not fit alone is not legal; this also takes the usages that stand for infinity.
            unary[v] = np.where(used > limit, ILLEGAL, unary[v])
            np.minimum(used, limit, out=used)
    group, strategies = grouped(unary, pairs)
    states = [0] * (1 + int(group.max()))
    for g, own in zip(group.tolist(), strategies, strict=True):
        states[g] = len(own)
    usage = [used[own] for used, own in zip(usage, strategies, strict=True)]
    return Instance(
        problem["name"],
        joined(unary, pairs, group, strategies, states),
        CostGraph(unary, pairs),
        group,
        strategies,
        np.concatenate([[0], np.cumsum([len(used) for used in usage])[:-1]]),
        np.concatenate(usage),
        intervals[:, 0],
        intervals[:, 1],
        limit,
    )


def grouped(unary, pairs):
    """The group of every node, and its strategy by the state of the group: nodes are in one group where the strategy
    of one leaves the other a single legal one.
    """
    legal = [np.flatnonzero(costs < ILLEGAL) for costs in unary]
    strategies = [states if len(states) else np.arange(len(costs)) for states, costs in zip(legal, unary, strict=True)]
    first = list(range(len(unary)))  # of the group that a node is in
    members = {v: [v] for v in first}
    matching = {id(costs): _matches(costs) for _, _, costs in pairs}
    for u, v, costs in pairs:
        if not matching[id(costs)]:
            continue
        a, b = first[u], first[v]
        fits = costs[np.ix_(strategies[u], strategies[v])] < ILLEGAL
        if a == b:
            here = there = np.flatnonzero(fits.diagonal())
        else:
            here, there = np.nonzero(fits)
        if not len(here) or len(set(here.tolist())) < len(here) or len(set(there.tolist())) < len(there):
            continue
        _keep(strategies, members[a], here)
        if a != b:
            _keep(strategies, members[b], there)
            a, b = sorted((a, b), key=lambda g: -len(members[g]))
            for w in members[b]:
                first[w] = a
            members[a] += members.pop(b)
    return np.unique(first, return_inverse=True)[1], strategies


def _keep(strategies, nodes, states):
    if len(states) < len(strategies[nodes[0]]) or (np.diff(states) < 0).any():
        for v in nodes:
            strategies[v] = strategies[v][states]


def _matches(costs):
    legal = costs < ILLEGAL
    return bool(legal.sum(0).max() <= 1 and legal.sum(1).max() <= 1)


def joined(unary, pairs, group, strategies, states):
    """The costs of groups: those of their nodes, and of the edges inside them."""
    group = group.tolist()
    own = [np.zeros(count, np.int64) for count in states]
    for v, costs in enumerate(unary):
        own[group[v]] += costs[strategies[v]]
    between, known = [], {}
    for u, v, costs in pairs:
        a, b = group[u], group[v]
        if a == b:
            own[a] += costs[strategies[u], strategies[v]]
            continue
        key = id(costs), strategies[u].tobytes(), strategies[v].tobytes()
        if key not in known:
            known[key] = costs[np.ix_(strategies[u], strategies[v])]
        between.append((a, b, known[key]))
    return CostGraph([np.minimum(costs, FORBIDDEN) for costs in own], between)


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
