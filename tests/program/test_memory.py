import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import chain, least, limited

from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.errors import CostGraphError
from shardwise.program.memory import MemoryRow, solve_within

quick = settings(max_examples=40, deadline=None)


@quick
@given(limited(most_rows=1))
def test_one_row_is_feasible_exactly_where_brute_force_finds_a_solution(case):
    graph, rows = case
    found = solve_within(graph, rows)
    optimum = least(graph, rows)
    assert found.feasible == (optimum < FORBIDDEN)
    assert found.bound <= optimum
    assert graph.cost(found.states) == found.cost
    if found.feasible:
        assert optimum <= found.cost
        assert rows[0].total(found.states) <= rows[0].limit


@quick
@given(limited(most_rows=3))
def test_what_is_found_within_several_rows_keeps_them_and_the_bound_holds(case):
    graph, rows = case
    found = solve_within(graph, rows)
    optimum = least(graph, rows)
    assert found.bound <= optimum
    if found.feasible:
        assert optimum <= found.cost == graph.cost(found.states)
        assert all(row.total(found.states) <= row.limit for row in rows)


@quick
@given(limited(most_rows=2), st.data())
def test_a_start_within_the_rows_is_never_made_worse(case, data):
    graph, rows = case
    start = data.draw(st.tuples(*(st.integers(0, size - 1) for size in graph.sizes)))
    if graph.cost(start) < FORBIDDEN and all(row.total(start) <= row.limit for row in rows):
        found = solve_within(graph, rows, limit=4, start=start)
        assert found.feasible
        assert found.cost <= graph.cost(start)


def test_without_rows_the_optimum_is_its_own_bound():
    found = solve_within(chain(50), [])
    assert found.feasible
    assert found.cost == found.bound


def test_a_limit_that_nothing_keeps_gives_the_solution_with_the_least_bytes():
    graph = CostGraph([np.array([0, 5])] * 2, [])
    row = MemoryRow(3, {0: np.array([9, 2]), 1: np.array([9, 2])})
    found = solve_within(graph, [row])
    assert not found.feasible
    assert found.states == [1, 1]
    assert found.cost == 10


def test_the_gap_of_a_chain_is_small():
    graph = chain(300)
    rng = np.random.default_rng(1)
    nbytes = {v: np.sort(rng.integers(1, 1 << 30, size=size))[::-1].copy() for v, size in enumerate(graph.sizes)}
    free = solve_within(graph, []).states
    row = MemoryRow(0, nbytes)
    row = MemoryRow((row.total(free) + row.least) // 2, nbytes)
    found = solve_within(graph, [row])
    assert found.feasible
    assert found.bound <= found.cost <= found.bound * 1.01


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        ({0: np.array([1, 2, 3])}, "do not fit the states"),
        ({7: np.array([1, 2])}, "do not fit the states"),
        ({0: np.array([1, -2])}, "not int64 from 0 on"),
        ({0: np.array([1.0, 2.0])}, "not int64 from 0 on"),
    ],
)
def test_rows_that_do_not_fit_the_graph_are_refused(nbytes, message):
    with pytest.raises(CostGraphError, match=message):
        solve_within(CostGraph([np.array([0, 5])], []), [MemoryRow(3, nbytes)])
