"""Bounds by messages, on whole graphs and on folded ones, beside the least cost of all combinations of states."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.program.folded_graph import FoldedGraph
from shardwise.program.messages import Cells, Messages, PairTable

STATES = 3
BARELY = 1e-6


def some_graph(seed, variables, kinds, pairs):
    """Looks, own costs by look, tables by kind, and pairs; states share cells in some tables."""
    random = np.random.default_rng(seed)
    looks = [int(random.integers(2)) for _ in range(variables)]
    own = random.integers(0, 20, (2, STATES)).astype(float)
    tables = {}
    for kind in range(kinds):
        cells = [np.array([0, 1, int(random.integers(2))]) for _ in range(2)]
        tables[kind] = PairTable(random.integers(0, 20, (2, 2)).astype(float), tuple(Cells(of, 2) for of in cells))
    return looks, own, tables, [(int(random.integers(kinds)), u, v) for u, v in pairs]


def messages_of(looks, own, tables, pairs, hops):
    graph = FoldedGraph(looks, pairs, hops)
    unary = [own[looks[members[0]]].copy() for members in graph.members]
    return Messages(graph, unary, tables, [float(members[0]) for members in graph.members])


def least_cost(looks, own, tables, pairs):
    def cost(states):
        total = sum(own[look][state] for look, state in zip(looks, states, strict=True))
        for kind, u, v in pairs:
            a, b = tables[kind].ends
            total += tables[kind].costs[a.of[states[u]], b.of[states[v]]]
        return total

    return min(map(cost, product(range(STATES), repeat=len(looks))))


@st.composite
def edges(draw):
    """Variables, and any pairs of two of them, some of them twice."""
    variables = draw(st.integers(2, 6))
    ends = st.tuples(*[st.integers(0, variables - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    return variables, draw(st.lists(ends, max_size=9))


@given(st.integers(0, 10**6), edges(), st.integers(0, 3))
def test_no_combination_is_below_the_bound_after_any_sweep(seed, graph, hops):
    variables, ends = graph
    case = some_graph(seed, variables, 2, ends)
    least, messages = least_cost(*case), messages_of(*case, hops)
    assert messages.bound() <= least + BARELY
    for _ in range(4):
        messages.sweep()
        assert messages.bound() <= least + BARELY


@given(st.integers(0, 10**6), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_the_bound_of_a_tree_is_the_least_cost(seed, parents):
    ends = [(min(parent, v), v + 1) for v, parent in enumerate(parents)]
    case = some_graph(seed, len(ends) + 1, 2, ends)
    messages = messages_of(*case, hops=len(ends))
    for _ in range(2 * len(ends) + 2):
        messages.sweep()
    assert messages.bound() == pytest.approx(least_cost(*case))


@pytest.mark.parametrize(("seed", "width"), [(0, 1), (1, 2), (2, 2), (3, 3)])
def test_many_layers_are_folded_to_as_many_classes_as_some(seed, width):
    """A chain of layers, each a path of some variables; its bound is close to the optimum, which the whole one has."""

    def chain(layers):
        count = layers * width + 2
        looks = [1, *[0] * (count - 2), 1]
        _, own, tables, _ = some_graph(seed, 2, width, [])
        return looks, own, tables, [(v % width, v, v + 1) for v in range(count - 1)]

    folded = [messages_of(*chain(layers), hops=2 * width) for layers in (10, 20)]
    assert len(folded[0].graph.members) == len(folded[1].graph.members) < 10 * width
    whole = messages_of(*chain(20), hops=20 * width)
    best = 0.0
    for _ in range(20):
        folded[1].sweep()
        best = max(best, folded[1].bound())
    for _ in range(2):
        whole.sweep()
    assert 0.9 * whole.bound() < best <= whole.bound() + BARELY


def test_the_more_layers_are_told_apart_the_closer_is_the_bound():
    """Layers with sums that skip calls, as in a transformer."""
    block, count = 8, 24 * 8
    random = np.random.default_rng(0)
    own = random.integers(0, 20, (block, STATES)).astype(float)
    each = Cells(np.arange(STATES), STATES)
    tables = {
        kind: PairTable(random.integers(0, 20, (STATES, STATES)).astype(float), (each, each))
        for kind in range(2 * block)
    }
    pairs = [(v % block, v, v + 1) for v in range(count - 1)]
    pairs += [(block + v % block, v, v + 3) for v in range(0, count - 3, 2)]
    bounds = []
    for hops in (1, 4, 12, count):
        messages = messages_of([v % block for v in range(count)], own, tables, pairs, hops)
        bounds.append(0.0)
        for _ in range(60):
            messages.sweep()
            bounds[-1] = max(bounds[-1], messages.bound())
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[2] - 1
    assert bounds[2] == pytest.approx(bounds[3], rel=1e-4)


def test_a_chain_is_folded_to_its_ends_and_what_is_between():
    graph = FoldedGraph([0, 1, 1, 1, 1, 2], [(0, v, v + 1) for v in range(5)], hops=1)
    assert [graph.classes.count(graph.classes[v]) for v in range(6)] == [1, 1, 2, 2, 1, 1]
    assert sum(graph.counts.values()) == 5
    assert max(graph.counts.values()) == 1


def test_what_is_chosen_is_the_best_of_a_chain():
    own = np.array([[0.0, 1.0, 5.0], [3.0, 0.0, 0.0]])
    cells = Cells(np.arange(3), 3)
    tables = {0: PairTable(5.0 - 5.0 * np.eye(3), (cells, cells))}
    messages = messages_of([0, 1, 0], own, tables, [(0, 0, 1), (0, 1, 2)], hops=3)
    for _ in range(4):
        messages.sweep()
    states = messages.chosen()
    assert [states[c] for c in messages.graph.classes] == [1, 1, 1]
    assert messages.bound() == pytest.approx(2.0)
