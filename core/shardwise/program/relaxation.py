"""Bounds and optima by a solver of linear programs: scipy's HiGHS, which only proofs and tests ask for."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from attrs import frozen

from shardwise.program.cost_graph import FORBIDDEN, CostGraph, Costs
from shardwise.program.errors import MissingSolverError
from shardwise.program.memory_row import MemoryRow, check_rows, priced
from shardwise.program.network import merged_tables

__all__ = ["integer_optimum", "lower_bound"]

_INFEASIBLE = 2  # scipy's status
_ROUNDING = 1 << 20  # how finely a dual value is rounded, in parts of the unit of the program


@frozen(eq=False)
class _Program:
    """A column per legal state and per legal pair of states; rows that make a pair's columns agree with its states."""

    costs: np.ndarray
    matrix: Any  # scipy.sparse.csr_matrix
    right: np.ndarray
    memory: Any
    limits: np.ndarray
    columns: list[np.ndarray]  # by variable and state; -1 is not legal
    agree: list[tuple[int, int, Costs, int]]  # a pair, its costs and its first row
    unit: int


def lower_bound(graph: CostGraph, rows: Sequence[MemoryRow] = ()) -> int:
    """A lower bound on the cost within the rows: the linear program over the local polytope.

    The bound never exceeds the optimum, however inexact the solver's floating point is. Its dual values are rounded to
    whole numbers and move costs between states and pairs; the sum of the least costs afterwards is computed exactly.
    FORBIDDEN says that the program has no solution.
    """
    optimize = _scipy()
    check_rows(graph, rows)
    program = _program(graph, rows)
    if program is None:
        return FORBIDDEN
    memory = {"A_ub": program.memory, "b_ub": program.limits} if rows else {}
    found = optimize.linprog(
        program.costs, A_eq=program.matrix, b_eq=program.right, bounds=(0, None), method="highs", **memory
    )
    if found.status == _INFEASIBLE:
        return FORBIDDEN
    if found.status != 0:
        return 0
    multipliers = (
        [
            Fraction(max(0.0, -float(value) * program.unit / limit))
            for value, limit in zip(found.ineqlin.marginals, _scales(rows), strict=True)
        ]
        if rows
        else []
    )
    with_prices, within = priced(graph, rows, multipliers)
    moved = [[int(cost) for cost in costs] for costs in with_prices.unary]
    duals = [round(float(value) * program.unit) for value in found.eqlin.marginals]
    total = -within
    for u, v, costs, first in program.agree:
        a = duals[first : first + costs.shape[0]]
        b = duals[first + costs.shape[0] : first + sum(costs.shape)]
        total += min(int(costs[s, t]) - a[s] - b[t] for s, t in zip(*np.nonzero(costs < FORBIDDEN), strict=True))
        moved[u] = [cost + more for cost, more in zip(moved[u], a, strict=True)]
        moved[v] = [cost + more for cost, more in zip(moved[v], b, strict=True)]
    for state_costs, columns in zip(moved, program.columns, strict=True):
        total += min(cost for cost, column in zip(state_costs, columns, strict=True) if column >= 0)
    return max(0, min(total, FORBIDDEN))


def integer_optimum(graph: CostGraph, rows: Sequence[MemoryRow] = (), seconds: float = 60.0) -> tuple[list[int], int]:
    """The optimum within the rows by an integer program, for small problems: states and cost.

    Where there is no legal solution, the states are all 0 and the cost is FORBIDDEN; where the time ends first, the
    best solution so far.
    """
    optimize = _scipy()
    check_rows(graph, rows)
    nothing = [0] * len(graph.unary), FORBIDDEN
    program = _program(graph, rows)
    if program is None:
        return nothing
    constraints = [optimize.LinearConstraint(program.matrix, program.right, program.right)]
    if rows:
        constraints.append(optimize.LinearConstraint(program.memory, -np.inf, program.limits))
    found = optimize.milp(
        program.costs,
        integrality=np.ones_like(program.costs),
        bounds=optimize.Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return nothing
    states = [
        int(np.argmax([found.x[column] if column >= 0 else -1.0 for column in columns])) for columns in program.columns
    ]
    return states, graph.cost(states)


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        raise MissingSolverError(
            "a proof needs scipy's HiGHS. Install the extra `bench`: pip install shardwise[bench]"
        ) from error
    return optimize


def _scales(rows: Sequence[MemoryRow]) -> list[int]:
    return [max(1, row.limit) for row in rows]


def _program(graph: CostGraph, rows: Sequence[MemoryRow]) -> _Program | None:
    """The linear program, or None where a variable or a pair has no legal state."""
    from scipy.sparse import csr_matrix

    count = 0
    costs: list[Costs] = []
    columns = []
    tables = merged_tables(graph)
    if any((each >= FORBIDDEN).all() for each in (*graph.unary, *tables.values())):
        return None
    entries: list[tuple[np.ndarray, np.ndarray, float]] = []  # rows, columns, value
    for v, unary in enumerate(graph.unary):
        legal = np.flatnonzero(unary < FORBIDDEN)
        numbers = np.full(len(unary), -1)
        numbers[legal] = np.arange(count, count + len(legal))
        count += len(legal)
        columns.append(numbers)
        costs.append(unary[legal])
        entries.append((np.full(len(legal), v), numbers[legal], 1.0))
    row = len(graph.unary)
    agree = []
    for (u, v), table in sorted(tables.items()):
        s, t = np.nonzero(table < FORBIDDEN)
        numbers = np.arange(count, count + len(s))
        count += len(s)
        costs.append(table[s, t])
        entries += [(row + s, numbers, 1.0), (row + table.shape[0] + t, numbers, 1.0)]
        for end, first in ((u, row), (v, row + table.shape[0])):
            legal = np.flatnonzero(columns[end] >= 0)
            entries.append((first + legal, columns[end][legal], -1.0))
        agree.append((u, v, table, row))
        row += sum(table.shape)
    unit = max(1, max((int(each.max()) for each in costs if each.size), default=1) // _ROUNDING)
    where = [np.concatenate([entry[i] for entry in entries]) for i in (0, 1)]
    values = np.concatenate([np.full(len(entry[0]), entry[2]) for entry in entries])
    right = np.zeros(row)
    right[: len(graph.unary)] = 1
    return _Program(
        np.concatenate(costs) / unit,
        csr_matrix((values, (where[0], where[1])), shape=(row, count)),
        right,
        _memory(rows, columns, count),
        np.array([each.limit / scale for each, scale in zip(rows, _scales(rows), strict=True)]),
        columns,
        agree,
        unit,
    )


def _memory(rows: Sequence[MemoryRow], columns: Sequence[np.ndarray], count: int) -> Any:
    """The bytes of each row in parts of its limit."""
    from scipy.sparse import csr_matrix

    row_numbers: list[int] = []
    numbers: list[int] = []
    values: list[float] = []
    for i, (row, scale) in enumerate(zip(rows, _scales(rows), strict=True)):
        for v, nbytes in row.nbytes.items():
            for column, n in zip(columns[v].tolist(), nbytes.tolist(), strict=True):
                if column >= 0 and n:
                    row_numbers.append(i)
                    numbers.append(column)
                    values.append(n / scale)
    return csr_matrix((values, (row_numbers, numbers)), shape=(len(rows), count))
