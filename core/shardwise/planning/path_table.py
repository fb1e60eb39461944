"""What the cheapest paths between all layouts of a tensor cost, found together.

A search (:mod:`shardwise.planning.path_search`) finds one path and visits few layouts for it. A bound on a step needs
the cost of every move of a tensor, thousands of them. Then all starts are followed at once: the costs from all of them
to a layout are one row of a matrix, and each step into the layout is one comparison with the row of another.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from shardwise.kernel.placements import Placement, is_strided, partial
from shardwise.planning.layout_graph import Codes, LayoutGraph, encode, searching

__all__ = ["PathTable"]

_MOST_LAYOUTS = 2_500
"""Of a table: a tensor of five dims on four mesh dims has 2,401, which make 46 MB."""

_SUM = encode(partial("sum"))


@frozen(eq=False)
class PathTable:
    """The costs of paths between all layouts whose placements are R, S(d) and P(sum).

    A layout's index counts its placements, the last mesh dim fastest, in the order of ``codes``. ``seconds`` has the
    start in rows and the goal in columns; it is infinite where there is no path.
    """

    codes: Codes
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, graph: LayoutGraph) -> PathTable | None:
        """The table of a graph; None if it were too large, or if a mesh dim has one rank: that one is relabelled."""
        codes = (*range(len(graph.shape) + 1), _SUM)
        if graph.single or len(codes) ** len(graph.mesh_shape) > _MOST_LAYOUTS:
            return None
        with searching(graph):
            steps = _steps_into(graph, list(product(codes, repeat=len(graph.mesh_shape))))
        return cls(codes, _least(steps).T)

    def code(self, placement: Placement) -> int | None:
        """Which of the codes a placement has; None for one that no layout of the table has."""
        if is_strided((placement,)):
            return None
        code = encode(placement)
        return self.codes.index(code) if code in self.codes else None


#: By layout, the layouts from which a step leads to it, and what the steps cost.
_Steps = list[tuple[NDArray[np.intp], NDArray[np.float64]]]


def _steps_into(graph: LayoutGraph, layouts: list[Codes]) -> _Steps:
    number = {layout: i for i, layout in enumerate(layouts)}
    steps: list[tuple[list[int], list[float]]] = [([], []) for _ in layouts]
    goal = (_SUM,) * len(graph.mesh_shape)  # fills that a goal has no use for are on none of its cheapest paths
    for layout, i in number.items():
        for cost, after, *_ in (*graph.edges(layout), *graph.fills(layout, goal)):
            sources, costs = steps[number[after]]
            sources.append(i)
            costs.append(cost)
    return [(np.array(sources, np.intp), np.array(costs)) for sources, costs in steps]


def _least(steps: _Steps) -> NDArray[np.float64]:
    """The least cost of each layout, in rows, from each start."""
    least = np.full((len(steps), len(steps)), math.inf)
    np.fill_diagonal(least, 0.0)
    is_final = False
    while not is_final:
        is_final = True
        for row, (sources, costs) in zip(least, steps, strict=True):
            if len(sources):
                new = (least[sources] + costs[:, None]).min(axis=0)
                if (new < row).any():
                    np.minimum(row, new, out=row)
                    is_final = False
    return least
