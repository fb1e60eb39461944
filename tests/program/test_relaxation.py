import sys

import numpy as np
import pytest
from hypothesis import given, settings
from random_graphs import all_costs, chain, cost_graphs, least, limited

from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.elimination import eliminate
from shardwise.program.errors import MissingSolverError
from shardwise.program.memory import solve_within
from shardwise.program.relaxation import integer_optimum, lower_bound

quick = settings(max_examples=25, deadline=None)


@pytest.fixture
def highs():
    pytest.importorskip("scipy", reason="bounds by a linear program need the extra `bench`")


@pytest.mark.usefixtures("highs")
class TestWithScipy:
    @quick
    @given(cost_graphs(variables=5))
    def test_the_bound_never_exceeds_the_optimum(self, graph):
        assert lower_bound(graph) <= all_costs(graph).min()

    @quick
    @given(limited(most_rows=2))
    def test_the_bound_never_exceeds_the_optimum_within_rows(self, case):
        graph, rows = case
        bound = lower_bound(graph, rows)
        assert bound <= least(graph, rows)
        found = solve_within(graph, rows)
        assert not found.feasible or bound <= found.cost

    @quick
    @given(cost_graphs(variables=5))
    def test_the_integer_program_equals_brute_force(self, graph):
        states, cost = integer_optimum(graph)
        assert cost == graph.cost(states) == all_costs(graph).min() or cost == FORBIDDEN == all_costs(graph).min()

    @quick
    @given(limited(most_rows=2))
    def test_the_integer_program_equals_brute_force_within_rows(self, case):
        graph, rows = case
        states, cost = integer_optimum(graph, rows)
        assert cost == least(graph, rows)
        assert cost == FORBIDDEN or all(row.total(states) <= row.limit for row in rows)

    def test_the_bound_of_a_tree_is_its_optimum_but_for_the_rounding(self):
        graph = chain(6)
        optimum = eliminate(graph)[1]
        assert optimum * 0.9999 <= lower_bound(graph) <= optimum


def test_a_missing_solver_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    graph = CostGraph([np.array([1])], [])
    with pytest.raises(MissingSolverError, match="extra `bench`"):
        lower_bound(graph)
    with pytest.raises(MissingSolverError, match="extra `bench`"):
        integer_optimum(graph)
