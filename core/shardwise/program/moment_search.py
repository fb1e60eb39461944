"""Assignments that hold less than a limit, found by prices on the moments at which too much is held.

Each round solves the step at prices that follow what was held before: where much is, a byte is worth more, and where
little is, nothing. All prices together rise until the limit is kept, and fall again as far as it stays kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.moment_prices import PRICE_BITS, MomentPrices
from shardwise.program.step_problem import Assignment, StepProblem

__all__ = ["MomentSearch"]

_ROUNDS = 12
_RAISE = 8  # of all prices together
_HIGHEST = FORBIDDEN // 64  # nanoseconds that all bytes that are held cost: far from what is illegal
_WEIGHTS = 30  # bits of the weight of a moment among others


@define(eq=False)
class MomentSearch:
    """The search for assignments within a limit; ``solved`` solves a step at prices, from a start."""

    problem: StepProblem
    limit: int
    solved: Callable[[MomentPrices, Assignment], Assignment]
    _weights: NDArray[np.float64] = field(init=False)
    #: The bytes that all prices together are counted for.
    _bytes: int = field(init=False)

    def run(self, start: Assignment) -> Iterator[Assignment]:
        """What is found from a start, round by round."""
        found, cost = start, self.problem.cost(start)
        held = self.problem.moments.held(found)
        self._weights, self._bytes = np.ones(len(held)), max(self.limit, int(held.max()))
        self._follow(held)
        low, high, total = 0, 0, max(1, cost)
        for _ in range(_ROUNDS):
            found = self.solved(self._prices(total), found)
            yield found
            held = self.problem.moments.held(found)
            if held.max() <= self.limit:
                high = total
            else:
                low = total
                self._follow(held)
            if low == _HIGHEST and high == 0:
                low //= _RAISE  # other weights may help
            total = max(1, low * _RAISE if high == 0 else round((float(max(low, high // 64)) * float(high)) ** 0.5))
            total = min(total, _HIGHEST)

    def _follow(self, held: NDArray[np.int64]) -> None:
        """Change the weights by what is held: to the fourth power, so that a few rounds make a difference."""
        usage = held / max(1, int(held.max()))
        self._weights = self._weights * (usage * usage) * (usage * usage)
        self._weights /= self._weights.max()

    def _prices(self, total: int) -> MomentPrices:
        """The prices at which all bytes cost so many nanoseconds together."""
        each = [int(weight * (1 << _WEIGHTS)) for weight in self._weights]
        byte = (total << PRICE_BITS) // max(1, self._bytes)
        moments = self.problem.moments
        return MomentPrices(moments, moments.over_lives([byte * weight // sum(each) for weight in each]))
