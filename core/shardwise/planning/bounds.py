"""Lower bounds on what a transition costs, without a search: for one mesh dim, for the first few, and for a whole pair.

All of them rest on the same facts. Each mesh dim that must communicate brings its latency. Reductions and gathers
cannot share a start, nor can two reductions. In bytes, a rank must receive what it needs and lacks; of a partial
tensor it lacks all, and an element that is reduced over n ranks takes n - 1 messages. However the other mesh dims lie
on the way, a rank holds at least its part of an even split over the whole mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.planning.cost import JUST_UNDER
from shardwise.planning.layout_graph import Codes, LayoutGraph

__all__ = ["Bounds", "Estimate"]

_ANY_OTHER_SHARD = 1 << 30  # a code that no layout has


class Bounds:
    """What leaving one layout must cost: per mesh dim for a new placement there, and for the first mesh dims together.

    Seconds come in two parts, before the first byte and for the bytes, because bounds on bytes may replace each other.
    """

    def __init__(self, graph: LayoutGraph, source: Codes) -> None:
        self.source = source
        self._graph = graph
        self._settled = graph.settled(source) if graph.single else source
        self._least = graph.numel / graph.ranks * graph.itemsize
        self._steps: dict[tuple[int, int], tuple[float, float]] = {}
        self._prefixes: dict[Codes, tuple[float, float]] = {}

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
        costs = self._graph.costs
        if here == code:
            return 0.0, 0.0
        local = costs.links.local_start
        if self._graph.mesh_shape[mesh_dim] == 1:
            return local * JUST_UNDER, 0.0
        if here == 0:
            return local * JUST_UNDER, self._least / costs.links.memory_bandwidth * JUST_UNDER
        n, start, latency, seconds_per_byte = self._graph.alone[mesh_dim]
        if here > 0:
            sharing = sum(other > 0 for other in self.source)
            rounds, received = 1, (n - 1) / n * self._least / sharing if code > 0 else (n - 1) * self._least
        else:
            sharing = self.source.count(here)
            rounds = 1 if code else 2
            received = rounds * (n - 1) * self._least
        return (start / sharing + rounds * latency) * JUST_UNDER, received * seconds_per_byte * JUST_UNDER

    def prefix(self, codes: Codes) -> tuple[float, float]:
        """Seconds for the bytes that some rank must receive until its first mesh dims lie as ``codes``; and seconds
        before the first byte for those of them that must leave and come back.
        """
        known = self._prefixes.get(codes)
        if known is None:
            graph = self._graph
            moving = received(graph, self._settled, codes) * graph.fastest * graph.itemsize * JUST_UNDER
            before = sum(self._return(m) for m in disturbed(graph.mesh_shape, self.source, codes))
            known = self._prefixes[codes] = moving, before
        return known

    def _return(self, mesh_dim: int) -> float:
        """The least seconds before the first byte to leave a shard and to come back to it."""
        _, _, latency, _ = self._graph.alone[mesh_dim]
        leave, _ = self.step(mesh_dim, _ANY_OTHER_SHARD)
        return leave + min(latency, self._graph.costs.links.local_start) * JUST_UNDER


def disturbed(mesh_shape: Sequence[int], source: Codes, goal: Codes) -> list[int]:
    """Mesh dims already placed as in the goal that must still be undone and redone.

    Only right-most mesh dims of a tensor dim may leave it, and only right of those that are there may one join.
    """
    first: dict[int, int] = {}
    found = []
    for m, (here, there) in enumerate(zip(source, goal, strict=False)):
        if mesh_shape[m] == 1:
            continue
        if here == there:
            if here in first:
                found.append(m)
        else:
            if here > 0:
                first.setdefault(here, m)
            if there > 0:
                first.setdefault(there, m)
    return found


def received(graph: LayoutGraph, source: Codes, goal: Codes) -> float:
    """Elements that some rank must receive until the first mesh dims lie as ``goal``, the others as they may.

    Mesh dims split from left to right. So whatever becomes of the later ones, their ranks together cover what the first
    ones alone would leave to one rank, and what they hold lies in what they would hold by the first ones alone.
    """
    later = math.prod(graph.mesh_shape[len(goal) :])
    contributors = 1
    before, after = list(graph.shape), list(graph.shape)
    for n, here, there in zip(graph.mesh_shape, source, goal, strict=False):
        if here > 0:
            before[here - 1] = -(-before[here - 1] // n)
        elif here < 0 and here != there:
            contributors *= n
        if there > 0:
            after[there - 1] = -(-after[there - 1] // n)
    needed = math.prod(after)
    if contributors > 1:
        return needed / later + (contributors - 2) * graph.numel / graph.ranks
    found = (needed - math.prod(map(min, before, after))) / later
    late = apart(splits(graph.mesh_shape, goal), source[: len(goal)])
    if late is None:
        return found
    return max(found, (needed if graph.is_even else _needed_late(graph, goal, late)) / later)


def splits(mesh_shape: Sequence[int], layout: Codes) -> dict[int, list[int]]:
    """Per code of a shard in a layout, the mesh dims of several ranks that have it."""
    found: dict[int, list[int]] = {}
    for m, code in enumerate(layout):
        if code > 0 and mesh_shape[m] > 1:
            found.setdefault(code, []).append(m)
    return found


def apart(goal: Mapping[int, Sequence[int]], layout: Codes) -> int | None:
    """A mesh dim on which the last rank, first on all others, holds nothing under ``layout`` of its part under ``goal``
    (see :func:`splits`); ``None`` when there is none.

    So it is when a tensor dim is split by other mesh dims at some place of the order: the first of at least two pieces
    and the last of at least two share nothing.
    """
    for code, new in goal.items():
        at = 0
        for m, here in enumerate(layout):
            if here == code:
                if at == len(new):
                    break
                if new[at] != m:
                    return m
                at += 1
    return None


def _needed_late(graph: LayoutGraph, goal: Codes, late: int) -> int:
    """Elements under ``goal`` of the rank that is last on the mesh dim ``late`` and first on all others."""
    sizes = list(graph.shape)
    for m, (n, there) in enumerate(zip(graph.mesh_shape, goal, strict=False)):
        if there > 0:
            size = sizes[there - 1]
            step = -(-size // n)
            sizes[there - 1] = max(size - step * (n - 1), 0) if m == late else step
    return math.prod(sizes)


class Estimate:
    """A lower bound on the cost from a layout to ``goal``, whose mesh dims of one rank are all 0."""

    def __init__(self, graph: LayoutGraph, goal: Codes) -> None:
        self.goal = goal
        self._graph = graph
        self._alone = graph.alone
        links = graph.costs.links
        self._local_start = links.local_start
        self._least = graph.numel / graph.ranks * graph.itemsize
        self._copy = links.local_start + self._least / links.memory_bandwidth
        self._seconds_per_element = graph.fastest * graph.itemsize
        self._smallest = graph.numel / graph.ranks
        self._sizes = graph.sizes(goal)
        self._needed = math.prod(self._sizes)
        self._goal_bytes = graph.nbytes(goal)
        self._splits = splits(graph.mesh_shape, goal)
        self._known: dict[Codes, float] = {goal: 0.0}

    def __call__(self, layout: Codes) -> float:
        known = self._known.get(layout)
        if known is None:
            known = self._known[layout] = self._compute(layout) * JUST_UNDER
        return known

    def _compute(self, layout: Codes) -> float:
        start_gather = latency = local = 0.0
        reduced: dict[int, float] = {}
        contributors = 1
        copies = 0
        moving = 0  # the codes of shards that are left or joined so far, as bits; see `disturbed`
        for here, there, (n, start, doubling, _) in zip(layout, self.goal, self._alone, strict=True):
            if here == there:
                if here <= 0 or not moving >> here & 1:
                    continue
                local += min(doubling, self._copy)
            elif there > 0:
                moving |= 1 << there
            if here > 0:
                moving |= 1 << here
                latency += doubling
                start_gather = max(start_gather, start)
            elif here < 0:
                contributors *= n
                latency += doubling if there else 2 * doubling
                reduced[here] = max(reduced.get(here, 0.0), start)
            else:
                copies += 1
        if not latency:
            return self._copied(layout, copies)
        received = self._received(layout, contributors) * self._seconds_per_element
        return sum(reduced.values()) + start_gather + latency + local + copies * self._copy + received

    def _received(self, layout: Codes, contributors: int) -> float:
        """As :func:`received`, for a whole goal."""
        if contributors > 1:
            return self._needed + (contributors - 2) * self._smallest
        late = apart(self._splits, layout)
        if late is not None and self._graph.is_even:
            return self._needed
        held = 1
        for size, wanted in zip(self._graph.sizes(layout), self._sizes, strict=True):
            held *= min(size, wanted)
        found = self._needed - held
        return found if late is None else max(found, _needed_late(self._graph, self.goal, late))

    def _copied(self, layout: Codes, copies: int) -> float:
        """Slices and fills suffice, and cutting the largest mesh dim first writes least. Or a collective helps."""
        collective = min(start + doubling for n, start, doubling, _ in self._alone if n > 1)
        nbytes: float = self._graph.nbytes(layout)
        written = 0.0
        cuts = [n for n, h, g in zip(self._graph.mesh_shape, layout, self.goal, strict=True) if h == 0 and g > 0]
        for n in sorted(cuts, reverse=True):
            nbytes /= n
            written += nbytes
        written += (copies - len(cuts)) * self._goal_bytes
        local = copies * self._local_start + written / self._graph.costs.links.memory_bandwidth
        return min(local, collective + copies * self._copy)
