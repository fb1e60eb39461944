"""Random cost graphs for tests, and what brute force says about them."""

import numpy as np
from hypothesis import strategies as st

from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.memory_row import MemoryRow

VARIABLES = 8
STATES = 4


def table(draw, rng, shape):
    """Few different costs, so that there are ties; some entries are forbidden."""
    costs = rng.integers(0, draw(st.sampled_from([2, 5, 1000])), size=shape)
    costs[rng.random(shape) < draw(st.sampled_from([0, 0, 0.2, 0.6]))] = FORBIDDEN
    return costs


@st.composite
def cost_graphs(draw, variables=VARIABLES, states=STATES):
    """Trees, cycles, dense and disconnected graphs, with parallel pairs, pairs both ways and shared tables."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    n = draw(st.integers(1, variables))
    sizes = rng.integers(1, states + 1, size=n)
    every = [(u, v) for u in range(n) for v in range(n) if u != v]
    ends = {
        "tree": lambda: [(int(rng.integers(v)), v) for v in range(1, n)],
        "cycle": lambda: [(v, (v + 1) % n) for v in range(n) if n > 1],
        "dense": lambda: every,
        "loose": lambda: [pair for pair in every if rng.random() < 0.15],
        "parallel": lambda: [every[i] for i in rng.integers(len(every), size=n)] * 2 if every else [],
    }[draw(st.sampled_from(["tree", "cycle", "dense", "loose", "parallel"]))]()
    tables = {}
    pairs = []
    for u, v in ends:
        shape = (int(sizes[u]), int(sizes[v]))
        if shape not in tables or rng.random() < 0.7:
            tables[shape] = table(draw, rng, shape)
        pairs.append((u, v, tables[shape]))
    return CostGraph([table(draw, rng, size) for size in sizes], pairs)


def along(costs, axes, n):
    """A table as one over all n variables, to be broadcast."""
    order = np.argsort(axes)
    shape = [1] * n
    for i in order:
        shape[axes[i]] = costs.shape[i]
    return costs.transpose(order).reshape(shape)


def all_costs(graph):
    """The cost of every combination of states, as an array with an axis per variable."""
    n = len(graph.unary)
    total = sum(along(costs, [v], n) for v, costs in enumerate(graph.unary))
    total = total + sum(along(costs, [u, v], n) for u, v, costs in graph.pairs)
    return np.minimum(total, FORBIDDEN)


def all_bytes(graph, row):
    """The bytes of a memory row for every combination of states."""
    n = len(graph.unary)
    total = sum((along(nbytes, [v], n) for v, nbytes in row.nbytes.items()), np.zeros([1] * n, np.int64))
    return np.broadcast_to(total, graph.sizes)


@st.composite
def limited(draw, most_rows):
    """A graph with limits from what nobody keeps to what everybody keeps."""
    graph = draw(cost_graphs(variables=6))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows = []
    for _ in range(draw(st.integers(1, most_rows))):
        nbytes = {v: rng.integers(0, 50, size=size) for v, size in enumerate(graph.sizes) if rng.random() < 0.8}
        row = MemoryRow(0, nbytes)
        most = int(all_bytes(graph, row).max())
        rows.append(MemoryRow(draw(st.integers(0, most + 1)), nbytes))
    return graph, rows


def least(graph, rows):
    """The optimum within the rows by brute force, FORBIDDEN where there is none."""
    costs = all_costs(graph)
    for row in rows:
        costs = np.where(all_bytes(graph, row) <= row.limit, costs, FORBIDDEN)
    return int(costs.min())


def chain(n, *, states=10, kinds=40, seed=0):
    """A chain with skip links: pairs of neighbours, and of variables 7 and 20 apart; a few tables are shared by all."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(2, states + 1, size=kinds)]
    unary = [rng.integers(0, 1_000_000, size=size) for size in sizes]
    tables = {}

    def pair(u, v):
        key = (u % kinds, v % kinds)
        if key not in tables:
            tables[key] = rng.integers(0, 1_000_000, size=(sizes[key[0]], sizes[key[1]]))
        return u, v, tables[key]

    pairs = [pair(v, v + 1) for v in range(n - 1)]
    pairs += [pair(v, v + 7) for v in range(0, n - 7, 5)]
    pairs += [pair(v, v + 20) for v in range(0, n - 20, 20)]
    return CostGraph([unary[v % kinds] for v in range(n)], pairs)
