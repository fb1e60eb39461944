"""The search on the contest's instances, on small ones that can be tried out whole."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

INFINITE = 10**18
ROUNDS = 60


def small(seed):
    """An instance with nodes that match others, strategies that are not legal, and a limit that binds."""
    rng = random.Random(seed)  # noqa: S311
    sizes = [rng.choice((2, 3)) for _ in range(8)]
    begin = [rng.randrange(6) for _ in sizes]
    edges, costs = [], []
    for u, v in itertools.combinations(range(len(sizes)), 2):
        kind = rng.random()
        table = [[rng.randrange(100) for _ in range(sizes[v])] for _ in range(sizes[u])]
        if kind < 0.15:
            match = rng.sample(range(sizes[v]), sizes[v])
            table = [
                [c if i < len(match) and match[i] == j else INFINITE for j, c in enumerate(row)]
                for i, row in enumerate(table)
            ]
        if kind < 0.5:
            edges.append([u, v])
            costs.append([c for row in table for c in row])
    usages = [[rng.randrange(1, 50) for _ in range(size)] for size in sizes]
    return {
        "name": f"small {seed}",
        "nodes": {
            "intervals": [[b, b + rng.randrange(4)] for b in begin],
            "costs": [[rng.randrange(100) for _ in range(size)] for size in sizes],
            "usages": usages,
        },
        "edges": {"nodes": edges, "costs": costs},
        "usage_limit": rng.randrange(60, 140),
    }


def cost(problem, each):
    """The cost of strategies, or None where they are not legal or use too much."""
    nodes, edges = problem["nodes"], problem["edges"]
    sizes = [len(costs) for costs in nodes["costs"]]
    total = sum(costs[s] for costs, s in zip(nodes["costs"], each, strict=True))
    total += sum(c[each[u] * sizes[v] + each[v]] for (u, v), c in zip(edges["nodes"], edges["costs"], strict=True))
    for t in range(12):
        alive = [v for v, (begin, end) in enumerate(nodes["intervals"]) if begin <= t < end]
        if sum(nodes["usages"][v][each[v]] for v in alive) > problem["usage_limit"]:
            return None
    return None if total >= INFINITE else total


@pytest.mark.parametrize("seed", range(12))
def test_a_small_instance_is_solved_within_its_limit(seed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from contest import read
    from contest_search import Search

    problem = small(seed)
    (tmp_path / "small.json").write_text(json.dumps({"problem": problem}))
    instance = read(tmp_path / "small.json")
    tried = itertools.product(*(range(len(costs)) for costs in problem["nodes"]["costs"]))
    best = min((c for each in tried if (c := cost(problem, each)) is not None), default=None)
    search = Search(instance)
    search.run(lambda: search.rounds >= ROUNDS)
    if best is None:
        assert search.best is None
        return
    assert search.best is not None
    assert instance.checked(search.best) == cost(problem, instance.by_node(search.best)) == search.cost
    assert best <= search.cost <= 1.25 * best
    alike = np.bincount(instance.group)
    assert len(alike) < len(instance.group)  # some nodes match
