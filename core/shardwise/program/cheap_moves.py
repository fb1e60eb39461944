"""Costs of moves that no path undercuts, for the bound on a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from shardwise.kernel.placements import REPLICATE, Partial, Placement, is_strided, shard_dim
from shardwise.planning.cost import StepCosts
from shardwise.program.cost_graph import NANOSECONDS
from shardwise.program.step_graph import Places

__all__ = ["KINDS", "SAFE", "CheapMoves", "Floats", "kind_of_move"]

Floats = NDArray[np.float64]

SAFE = 1 - 1e-9
"""Against rounding: a bound is made this much smaller."""

_CUT, _OPEN, _REDUCE, _SCATTER, _GATHER, _EXCHANGE = range(6)
KINDS = range(6)


def kind_of_move(src: Placement, dst: Placement) -> int:
    """What a mesh dim must at least do to bring a tensor from one placement to another. ``_CUT`` and ``_OPEN`` send
    nothing; a rank may hold its share of the tensor meanwhile, or holds all of it.
    """
    if src == dst == REPLICATE:
        return _OPEN
    if src in (dst, REPLICATE) or isinstance(dst, Partial):
        return _CUT
    if is_strided((src,)) and shard_dim(src) == shard_dim(dst):
        return _CUT  # some pieces may be where they should be
    if isinstance(src, Partial):
        return _REDUCE if dst == REPLICATE else _SCATTER
    return _GATHER if dst == REPLICATE else _EXCHANGE


@define(eq=False)
class CheapMoves:
    """Costs of moves that no path undercuts.

    All reductions come before all gathers, in the best order, and mesh dims that a tensor does not lie over may share
    it meanwhile for the price of a gather. There is one start, and pieces are exchanged by all mesh dims at once.
    """

    costs: StepCosts
    _seconds: Floats = field(init=False)
    _per_byte: Floats = field(init=False)

    def __attrs_post_init__(self) -> None:
        shape = (6,) * len(self.costs.sizes)
        self._seconds, self._per_byte = np.zeros(shape), np.zeros(shape)
        for kinds in np.ndindex(shape):
            self._seconds[kinds], self._per_byte[kinds] = self._first_seconds(kinds), self._least_per_byte(kinds)

    def table(self, nbytes: int, kinds: Sequence[Sequence[int]]) -> Floats:
        """Nanoseconds by combination of kinds, one list per mesh dim, for a tensor of so many bytes."""
        at = np.ix_(*kinds)
        table: Floats = (self._seconds[at] + nbytes * self._per_byte[at]) * (NANOSECONDS * SAFE)
        return table

    def seconds(self, nbytes: int, src: Places, dst: Places) -> float:
        """A bound on the seconds of one move."""
        kinds = tuple(map(kind_of_move, src, dst))
        return float(self._seconds[kinds] + nbytes * self._per_byte[kinds]) * SAFE

    def _first_seconds(self, kinds: Sequence[int]) -> float:
        start = latency = 0.0
        for m, kind in enumerate(kinds):
            if kind not in (_CUT, _OPEN):
                _, first, least, _ = self.costs.alone(m)
                start = max(start, first)
                latency += 2 * least if kind == _REDUCE else least
        return start + latency

    def _least_per_byte(self, kinds: Sequence[int]) -> float:
        of = {kind: [m for m, k in enumerate(kinds) if k == kind] for kind in KINDS}
        cut = self._ranks(of[_CUT] + of[_EXCHANGE])
        reduced, gathered = of[_SCATTER] + of[_REDUCE], of[_GATHER] + of[_REDUCE]
        least = math.inf
        for count in range(len(of[_OPEN]) + 1):
            for shared in combinations(of[_OPEN], count):
                # Before the gathers what is to be gathered is shared, and after the reductions what was scattered.
                first = self._in_order(reduced, 1 / (cut * self._ranks([*of[_GATHER], *shared])))
                then = self._in_order([*gathered, *shared], 1 / (cut * self._ranks(of[_SCATTER])))
                least = min(least, first + then)
        pieces = [0.0]
        for m in of[_EXCHANGE]:
            n, _, _, per_byte = self.costs.alone(m)
            pieces.append((n - 1) / n * per_byte / math.prod(self.costs.sizes))
        return least + max(pieces)

    def _in_order(self, dims: Sequence[int], share: float) -> float:
        """The least seconds per byte to reduce or to gather over mesh dims, each on what those before it have left."""
        least = math.inf
        for order in permutations(dims):
            total, left = 0.0, share
            for m in order:
                n, _, _, per_byte = self.costs.alone(m)
                total += (n - 1) / n * per_byte * left
                left /= n
            least = min(least, total)
        return least

    def _ranks(self, dims: Sequence[int]) -> int:
        return math.prod(self.costs.sizes[m] for m in dims)
