import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import all_costs, chain, cost_graphs

from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.elimination import eliminate, solve
from shardwise.program.errors import TableLimitError

quick = settings(max_examples=60, deadline=None)


@quick
@given(cost_graphs())
def test_elimination_equals_brute_force(graph):
    states, cost = eliminate(graph)
    assert cost == graph.cost(states) == all_costs(graph).min()


@quick
@given(cost_graphs(), st.randoms(use_true_random=False))
def test_other_numbers_of_variables_and_orders_of_states_change_no_cost(graph, random):
    n = len(graph.unary)
    numbers = random.sample(range(n), n)
    orders = [random.sample(range(size), size) for size in graph.sizes]
    pairs = [(numbers[u], numbers[v], costs[orders[u]][:, orders[v]]) for u, v, costs in graph.pairs]
    unary = [None] * n
    for v, costs in enumerate(graph.unary):
        unary[numbers[v]] = costs[orders[v]]
    assert eliminate(CostGraph(unary, random.sample(pairs, len(pairs))))[1] == eliminate(graph)[1]


@quick
@given(cost_graphs())
def test_equal_tables_that_are_different_objects_give_the_same_states(graph):
    copies = CostGraph([c.copy() for c in graph.unary], [(u, v, c.copy()) for u, v, c in graph.pairs])
    assert eliminate(copies) == eliminate(graph)


@quick
@given(cost_graphs(), st.sampled_from([1, 4, 16]), st.data())
def test_a_tiny_table_limit_is_never_worse_than_its_start_and_right_when_proven(graph, limit, data):
    start = data.draw(st.none() | st.tuples(*(st.integers(0, size - 1) for size in graph.sizes)))
    states, cost, proven = solve(graph, limit, start)
    least = all_costs(graph).min()
    assert cost == graph.cost(states) >= least
    assert start is None or cost <= graph.cost(start)
    assert cost == least or not proven


def test_among_equals_the_lowest_states_are_taken():
    flat = np.zeros((3, 3), np.int64)
    graph = CostGraph([np.zeros(3, np.int64)] * 4, [(v, (v + 1) % 4, flat) for v in range(4)])
    assert eliminate(graph) == ([0, 0, 0, 0], 0)


def test_a_graph_without_a_legal_solution_costs_forbidden():
    never = np.full((2, 2), FORBIDDEN)
    assert eliminate(CostGraph([np.zeros(2, np.int64)] * 2, [(0, 1, never)]))[1] == FORBIDDEN


def test_no_variables_cost_nothing():
    assert solve(CostGraph([], [])) == ([], 0, True)


def clique(n, states):
    rng = np.random.default_rng(5)
    pairs = [(u, v, rng.integers(0, 100, size=(states, states))) for v in range(n) for u in range(v)]
    return CostGraph([rng.integers(0, 100, size=states) for _ in range(n)], pairs)


def test_a_table_over_the_limit_is_refused_with_its_variable_and_size():
    with pytest.raises(
        TableLimitError, match="variable 0 needs a table of 125 entries, and the limit is 124"
    ) as raised:
        eliminate(clique(4, 5), limit=124)
    assert (raised.value.variable, raised.value.entries, raised.value.limit) == (0, 125, 124)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert eliminate(clique(4, 5), limit=125)[1] == all_costs(clique(4, 5)).min()


def test_large_tables_are_worked_on_in_chunks():
    graph = clique(7, 7)  # the first table has 117,649 entries, from 823,543 sums
    assert eliminate(graph)[1] == all_costs(graph).min()


def test_a_chain_of_five_thousand_variables_with_skip_links_is_solved():
    graph = chain(5_000)
    states, cost, proven = solve(graph)
    assert proven
    assert graph.cost(states) == cost


def test_a_variable_of_one_state_does_not_tie_its_neighbours_together():
    rng = np.random.default_rng(3)
    sizes = [1] + [2] * 200
    pairs = [(0, v, rng.integers(0, 100, size=(1, 2))) for v in range(1, 201)]
    pairs += [(v, v + 1, rng.integers(0, 100, size=(2, 2))) for v in range(1, 200)]
    graph = CostGraph([rng.integers(0, 100, size=size) for size in sizes], pairs)
    assert eliminate(graph, limit=4) == solve(graph)[:2]
