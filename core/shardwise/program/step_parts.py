"""Joint costs of several mesh dims, split into parts by mesh dim that together never exceed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from shardwise.program.cheap_moves import Floats
from shardwise.program.cost_graph import FORBIDDEN

__all__ = ["Factor", "Indices", "raised", "split"]

Indices: TypeAlias = NDArray[np.intp]

_MOST_ENTRIES = 20_000
"""Entries of a factor's table; beyond it no more combinations get their exact cost."""

_FADING, _FORGOTTEN = 0.9, 0.02
"""What the weight of a combination becomes with each round, and when it counts no more."""

_BARELY = 1e-6
"""How much a part that the solutions use gives way, beside one that they do not."""


def split(costs: Floats, at: tuple[int, ...]) -> list[Floats]:
    """Parts by dim of an array of costs: their sum is exact at ``at``, and nowhere more than the array."""
    ndim = costs.ndim
    legal = costs < FORBIDDEN
    costs = np.minimum(costs, costs[legal].max()) if legal.any() else np.zeros_like(costs)
    share = costs[at] / ndim
    parts = [costs[_line(at, m)] - share * (ndim - 1) for m in range(ndim)]
    # Whoever costs more than in the reference gives way, by how much more: nobody gets cheaper than there without need.
    gains = [np.maximum(part - share, 0.0) for part in parts]
    for m, gain in enumerate(gains):
        gain[at[m]] = 0.0  # but for rounding, which would let the reference itself give way
    changed = [(np.arange(n) != at[m]).astype(np.float64) for m, n in enumerate(costs.shape)]
    total, count = _sum(gains), np.maximum(_sum(changed), 1.0)
    missing = np.minimum(costs - _sum(parts), 0.0)
    for m in range(ndim):
        by_gain = _along(gains[m], m, ndim) / np.where(total > 0, total, 1.0)
        by_count = _along(changed[m], m, ndim) / count
        parts[m] += (missing * np.where(total > 0, by_gain, by_count)).min(axis=_others(m, ndim))
    return _given_back(costs, parts, 0)


def raised(
    costs: Floats, parts: Sequence[Floats], uses: Mapping[tuple[int, ...], float], rate: float, first: int = 0
) -> list[Floats]:
    """Parts that come closer to the costs at the places in ``uses``, which have weights, by a ``rate`` of what is
    missing there. Parts that are not in use give way; what is left over goes to mesh dim ``first`` and those after it.
    """
    ndim, total = costs.ndim, sum(uses.values())
    new, weights = [part.copy() for part in parts], [np.ones(n) for n in costs.shape]
    for at, times in uses.items():
        missing = float(costs[at] - sum(part[i] for part, i in zip(parts, at, strict=True)))
        for m, i in enumerate(at):
            new[m][i] += max(missing, 0.0) * rate * times / total / ndim
            weights[m][i] = max(weights[m][i] - times / total, _BARELY)
    excess = np.maximum(_sum(new) - costs, 0.0)
    of_all = _sum(weights)
    for m in range(ndim):
        new[m] -= (excess * (_along(weights[m], m, ndim) / of_all)).max(axis=_others(m, ndim))
    return _given_back(costs, new, first)


def _given_back(costs: Floats, parts: list[Floats], first: int) -> list[Floats]:
    """Parts with what they leave over."""
    ndim = costs.ndim
    for m in ((first + k) % ndim for k in range(ndim)):
        parts[m] = parts[m] + (costs - _sum(parts)).min(axis=_others(m, ndim))
    return parts


def _line(at: tuple[int, ...], m: int) -> tuple[Any, ...]:
    """The index of all states of one dim beside those of a place."""
    return (*at[:m], slice(None), *at[m + 1 :])


def _others(m: int, ndim: int) -> tuple[int, ...]:
    return tuple(k for k in range(ndim) if k != m)


def _along(values: NDArray[Any], m: int, ndim: int) -> NDArray[Any]:
    return values.reshape([-1 if k == m else 1 for k in range(ndim)])


def _sum(parts: Sequence[Floats]) -> Floats:
    total: Floats = reduce(np.add.outer, parts)
    return total


@define(eq=False)
class Factor:
    """One joint cost, of a call or of a move, and its parts. Equal ones of all layers are one.

    What it depends on are *kinds* by mesh dim: ``kinds[m]`` has one per state of a variable, or per pair of states
    of two; -1 is never legal. ``codes[m]`` has, per kind, its index in the table of costs that are known to be low
    enough: kinds share one until the exact cost of a combination with one of them is asked for. Costs are no higher
    than ``highest``: a part that gives way to a very high one is far too low elsewhere.
    """

    costs: Floats
    parts: list[Floats]
    kinds: Sequence[Indices]
    codes: list[Indices]
    exact: Callable[[Sequence[int]], float]
    highest: float
    #: Makes an array of the costs of all combinations of kinds, each low enough: close ones, but too many to keep. Also
    #: whether none is left out, as 0.
    close: Callable[[], tuple[Floats, bool] | None] = lambda: None
    #: Combinations of kinds that were chosen lately, with weights.
    _recent: dict[tuple[int, ...], float] = field(factory=dict, init=False)
    _asked: set[tuple[int, ...]] = field(factory=set, init=False)
    _arrays: list[Floats] | None = field(default=None, init=False)

    def arrays(self) -> Sequence[Floats]:
        """The parts by mesh dim, over the states of a variable or of two."""
        if self._arrays is None:
            self._arrays = [
                np.append(part, float(FORBIDDEN))[np.append(codes, -1)[kinds]]
                for part, codes, kinds in zip(self.parts, self.codes, self.kinds, strict=True)
            ]
        return self._arrays

    def missing(self, kinds: tuple[int, ...]) -> float:
        """By how much the parts of a combination of kinds are below its exact cost, as far as that counts."""
        self._learn(kinds)
        place = self._place(kinds)
        return max(
            0.0, float(self.costs[place]) - sum(float(part[i]) for part, i in zip(self.parts, place, strict=True))
        )

    def raise_at(self, uses: Mapping[tuple[int, ...], int], rate: float, first: int) -> None:
        """Bring the parts closer to the exact costs of combinations of kinds, by how often they are chosen."""
        total = sum(uses.values())
        recent = {kinds: weight * _FADING for kinds, weight in self._recent.items() if weight * _FADING > _FORGOTTEN}
        for kinds, times in uses.items():
            self._learn(kinds)
            recent[kinds] = recent.get(kinds, 0.0) + times / total
        at: dict[tuple[int, ...], float] = {}
        for kinds, weight in recent.items():
            place = self._place(kinds)
            at[place] = at.get(place, 0.0) + weight
        self.parts = [np.floor(part) for part in raised(self.costs, self.parts, at, rate, first)]
        self._recent, self._arrays = recent, None

    def _place(self, kinds: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(codes[kind]) for codes, kind in zip(self.codes, kinds, strict=True))

    def _learn(self, kinds: tuple[int, ...]) -> None:
        """Put the exact cost of a combination into the table, with codes of their own for its kinds."""
        if kinds in self._asked:
            return
        self._asked.add(kinds)
        cost = min(self.exact(kinds), self.highest)
        if cost <= self.costs[self._place(kinds)]:
            return
        for m, kind in enumerate(kinds):
            code = int(self.codes[m][kind])
            if np.count_nonzero(self.codes[m] == code) > 1:
                line = self.costs.take([code], axis=m)
                if self.costs.size + line.size > _MOST_ENTRIES:
                    return
                self.parts[m] = np.append(self.parts[m], self.parts[m][code])
                self.codes[m] = self.codes[m].copy()
                self.codes[m][kind] = self.costs.shape[m]
                self.costs = np.concatenate([self.costs, line], axis=m)
        place = self._place(kinds)
        self.costs[place] = max(self.costs[place], cost)
