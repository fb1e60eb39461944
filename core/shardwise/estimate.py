"""Lower bounds on what a transition costs, without a search: for one mesh dim, for the first few, and for a whole pair.

All of them rest on the same facts. Each mesh dim that must communicate brings its latency. Reductions and gathers
cannot share a start, nor can two pending kinds. In bytes, a rank must receive what it needs and lacks; of a pending
tensor it lacks all, and an element that is reduced over n ranks takes n - 1 messages. However the other mesh dims lie
on the way, a rank holds at least its part of an even split over the whole mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.moves import Layout, Moves

__all__ = ["SAFETY", "Bounds", "Estimate"]

# Estimates stay this much under what they bound, so that rounding never lifts them over it.
SAFETY = 1 - 1e-9


class Bounds:
    """What leaving one layout must cost: per mesh dim for a new placement there, and for the first mesh dims together.

    Seconds come in two parts, before the first byte and for the bytes, because bounds on bytes may replace each other.
    """

    def __init__(self, moves: Moves, source: Layout) -> None:
        self.source = source
        self._moves = moves
        self._least = moves.numel / math.prod(moves.mesh_shape) * moves.itemsize
        self._steps: dict[tuple[int, int], tuple[float, float]] = {}
        self._received: dict[Layout, float] = {}

    def step(self, mesh_dim: int, code: int) -> tuple[float, float]:
        """The least that a transition costs which makes the placement of a mesh dim ``code``; 0 when it is that.

        Summed over the mesh dims, these never exceed the transition's cost. A collective over several mesh dims starts
        once, so each of those in the source that could share it answers for its part of the start.
        """
        known = self._steps.get((mesh_dim, code))
        if known is None:
            known = self._steps[mesh_dim, code] = self._step(mesh_dim, code)
        return known

    def _step(self, mesh_dim: int, code: int) -> tuple[float, float]:
        here = self.source[mesh_dim]
        costs = self._moves.costs
        if here == code:
            return 0.0, 0.0
        local = costs.links.local_start
        if self._moves.mesh_shape[mesh_dim] == 1:
            return local * SAFETY, 0.0
        if here == 0:
            return local * SAFETY, self._least / costs.links.memory_bandwidth * SAFETY
        n, start, latency, seconds_per_byte = costs.alone(mesh_dim)
        if here > 0:
            sharing = sum(other > 0 for other in self.source)
            rounds, received = 1, (n - 1) / n * self._least / sharing if code > 0 else (n - 1) * self._least
        else:
            sharing = self.source.count(here)
            rounds = 1 if code else 2
            received = rounds * (n - 1) * self._least
        return (start / sharing + rounds * latency) * SAFETY, received * seconds_per_byte * SAFETY

    def received(self, codes: Layout) -> float:
        """Seconds for the bytes that some rank must receive until its first mesh dims lie as ``codes``."""
        known = self._received.get(codes)
        if known is None:
            moves = self._moves
            per_element = _fastest(moves) * moves.itemsize * SAFETY
            known = self._received[codes] = received(moves, self.source, codes) * per_element
        return known


def _fastest(moves: Moves) -> float:
    """Seconds per byte over the fastest mesh dim."""
    return min(moves.costs.alone(m)[3] for m in range(len(moves.mesh_shape)))


def received(moves: Moves, source: Layout, goal: Layout) -> float:
    """Elements that some rank must receive until the first mesh dims lie as ``goal``, the others as they may.

    Mesh dims split from left to right. So whatever becomes of the later ones, their ranks together cover what the first
    ones alone would leave to one rank, and what they hold lies in what they would hold by the first ones alone.
    """
    later = math.prod(moves.mesh_shape[len(goal) :])
    contributors = 1
    before, after = list(moves.shape), list(moves.shape)
    for n, here, there in zip(moves.mesh_shape, source, goal, strict=False):
        if here > 0:
            before[here - 1] = -(-before[here - 1] // n)
        elif here < 0 and here != there:
            contributors *= n
        if there > 0:
            after[there - 1] = -(-after[there - 1] // n)
    needed = math.prod(after)
    if contributors > 1:
        return needed / later + (contributors - 2) * moves.numel / math.prod(moves.mesh_shape)
    if moves.is_even and _apart(moves.mesh_shape, source, goal):
        return needed / later
    return (needed - math.prod(map(min, before, after))) / later


def _apart(mesh_shape: Sequence[int], source: Layout, goal: Layout) -> bool:
    """Whether some rank's part under ``goal`` shares nothing with its part under ``source``, both split evenly.

    So it is when a tensor dim is split by other mesh dims at some place of the order: the rank that is first on one and
    last on the other.
    """
    split = [(here, there) for n, here, there in zip(mesh_shape, source, goal, strict=False) if n > 1]
    for code in {there for _, there in split if there > 0}:
        old = [m for m, (here, _) in enumerate(split) if here == code]
        new = [m for m, (_, there) in enumerate(split) if there == code]
        if any(a != b for a, b in zip(old, new, strict=False)):
            return True
    return False


class Estimate:
    """A lower bound on the cost from a layout to ``goal``, whose mesh dims of one rank are all 0."""

    def __init__(self, moves: Moves, goal: Layout) -> None:
        self.goal = goal
        self._moves = moves
        self._alone = [moves.costs.alone(m) for m in range(len(goal))]
        links = moves.costs.links
        self._local_start = links.local_start
        self._least = moves.numel / math.prod(moves.mesh_shape) * moves.itemsize
        self._copy = links.local_start + self._least / links.memory_bandwidth
        self._seconds_per_byte = _fastest(moves) * moves.itemsize
        self._goal_bytes = moves.nbytes(goal)
        self._known: dict[Layout, float] = {goal: 0.0}

    def __call__(self, layout: Layout) -> float:
        known = self._known.get(layout)
        if known is None:
            known = self._known[layout] = self._compute(layout) * SAFETY
        return known

    def _compute(self, layout: Layout) -> float:
        start_gather = latency = 0.0
        reduced: dict[int, float] = {}
        copies = 0
        for here, there, (_, start, doubling, _) in zip(layout, self.goal, self._alone, strict=True):
            if here == there:
                continue
            if here < 0:
                latency += doubling if there else 2 * doubling
                reduced[here] = max(reduced.get(here, 0.0), start)
            elif here > 0:
                latency += doubling
                start_gather = max(start_gather, start)
            else:
                copies += 1
        if not latency:
            return self._copied(layout, copies)
        seconds = self._seconds_per_byte * received(self._moves, layout, self.goal)
        return sum(reduced.values()) + start_gather + latency + copies * self._copy + seconds

    def _copied(self, layout: Layout, copies: int) -> float:
        """Slices and fills suffice: they write the less the earlier the most is cut away. Or a collective helps."""
        collective = min(start + doubling for n, start, doubling, _ in self._alone if n > 1)
        nbytes = self._moves.nbytes(layout)
        written = 0.0
        cuts = [n for n, h, g in zip(self._moves.mesh_shape, layout, self.goal, strict=True) if h == 0 and g > 0]
        for n in sorted(cuts, reverse=True):
            nbytes /= n
            written += nbytes
        written += (copies - len(cuts)) * self._goal_bytes
        local = copies * self._local_start + written / self._moves.costs.links.memory_bandwidth
        return min(local, collective + copies * self._copy)
