"""A cost graph: variables with states, a cost per state, and costs per pair of states.

Costs are whole numbers from 0 to FORBIDDEN. A sum that reaches FORBIDDEN is FORBIDDEN, so sums neither overflow nor
depend on the order of their terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from shardwise.program.errors import CostGraphError

__all__ = ["FORBIDDEN", "NANOSECONDS", "CostGraph", "Costs"]

Costs: TypeAlias = NDArray[np.int64]

NANOSECONDS = 1e9  # of a second: costs are counted in them

FORBIDDEN = 1 << 50
"""The cost of what is not legal: 13 days in nanoseconds. 8,191 such costs add up without an overflow."""


def _checked(costs: Costs, shape: tuple[int, ...] | None, name: str) -> None:
    if costs.dtype != np.int64:
        raise CostGraphError(f"{name} is {costs.dtype}. Costs are int64, whole nanoseconds")
    if costs.size == 0 or (shape is not None and costs.shape != shape):
        raise CostGraphError(f"{name} has shape {costs.shape}. It needs {shape or 'at least one state'}")
    if costs.min() < 0 or costs.max() > FORBIDDEN:
        raise CostGraphError(f"{name} has costs from {costs.min()} to {costs.max()}. They are 0 to FORBIDDEN")


def _unary(each: Iterable[Costs]) -> tuple[Costs, ...]:
    return tuple(each)


def _pairs(each: Iterable[tuple[int, int, Costs]]) -> tuple[tuple[int, int, Costs], ...]:
    return tuple(each)


@frozen(eq=False)
class CostGraph:
    """Variables with states, a cost per state, and costs per pair of states; whole numbers (nanoseconds), int64.

    ``unary`` has an array [states] per variable. ``pairs`` has (u, v, array [states of u, states of v]) with u != v;
    several pairs of the same two variables are added. Equal arrays should be the same object: the solvers then do
    their work once. The arrays must not change afterwards.
    """

    unary: tuple[Costs, ...] = field(converter=_unary)
    pairs: tuple[tuple[int, int, Costs], ...] = field(converter=_pairs)

    def __attrs_post_init__(self) -> None:
        seen = set()
        for v, costs in enumerate(self.unary):
            if id(costs) not in seen:
                seen.add(id(costs))
                _checked(costs, None, f"the cost of variable {v}")
                if costs.ndim != 1:
                    raise CostGraphError(f"the cost of variable {v} has {costs.ndim} dims. It has one, its states")
        for u, v, costs in self.pairs:
            if not (0 <= u < len(self.unary) and 0 <= v < len(self.unary) and u != v):
                raise CostGraphError(f"pair ({u}, {v}): a pair has two different ones of {len(self.unary)} variables")
            shape = (len(self.unary[u]), len(self.unary[v]))
            if id(costs) not in seen or costs.shape != shape:
                seen.add(id(costs))
                _checked(costs, shape, f"the cost of pair ({u}, {v})")

    @property
    def sizes(self) -> list[int]:
        """The number of states of every variable."""
        return [len(costs) for costs in self.unary]

    def cost(self, states: Sequence[int]) -> int:
        """The sum of all costs with one state per variable; FORBIDDEN is the most."""
        total = sum(int(costs[state]) for costs, state in zip(self.unary, states, strict=True))
        total += sum(int(costs[states[u], states[v]]) for u, v, costs in self.pairs)
        return min(total, FORBIDDEN)
