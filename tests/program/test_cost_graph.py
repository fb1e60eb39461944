import numpy as np
import pytest

from shardwise.program.cost_graph import FORBIDDEN, CostGraph
from shardwise.program.errors import CostGraphError


def costs(*rows):
    return np.array(rows, np.int64)


def test_the_cost_is_the_sum_over_variables_and_pairs():
    graph = CostGraph([costs(1, 2), costs(10, 20, 30)], [(1, 0, costs([0, 100], [200, 300], [400, 500]))])
    assert graph.cost([1, 2]) == 2 + 30 + 500
    assert graph.sizes == [2, 3]


def test_parallel_pairs_are_added():
    graph = CostGraph([costs(0), costs(0)], [(0, 1, costs([3])), (1, 0, costs([4]))])
    assert graph.cost([0, 0]) == 7


def test_many_forbidden_costs_are_forbidden_once():
    graph = CostGraph([costs(FORBIDDEN)] * 20_000, [])
    assert graph.cost([0] * 20_000) == FORBIDDEN


@pytest.mark.parametrize(
    ("unary", "pairs", "message"),
    [
        ([np.array([0.5])], [], "float64. Costs are int64"),
        ([costs(-1)], [], "from -1 to -1"),
        ([costs(FORBIDDEN + 1)], [], "0 to FORBIDDEN"),
        ([costs()], [], "at least one state"),
        ([costs([1])], [], "has 2 dims"),
        ([costs(1), costs(1)], [(0, 0, costs([1]))], r"pair \(0, 0\)"),
        ([costs(1), costs(1)], [(0, 2, costs([1]))], r"pair \(0, 2\): .* different ones of 2 variables"),
        ([costs(1), costs(1, 2)], [(0, 1, costs([1], [2]))], r"shape \(2, 1\). It needs \(1, 2\)"),
    ],
)
def test_a_graph_that_is_not_well_formed_is_refused(unary, pairs, message):
    with pytest.raises(CostGraphError, match=message):
        CostGraph(unary, pairs)
