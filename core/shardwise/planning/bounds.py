"""Lower bounds on the cost of a path, without a search: for one mesh dim, for the first few, and for all of them.

All bounds rest on these facts. Each mesh dim that must communicate adds its latency. A reduction and a gather are two
collectives with two starts, and so are two reductions. A rank must receive the elements that it needs and does not
hold. Of a partial tensor it holds none, and an element that is reduced over n ranks takes n - 1 messages. Whatever the
placements of the other mesh dims are meanwhile, a rank holds at least its part of an even split over the whole mesh.

Example: 8 float32 elements on a (2,) mesh, from S(0) to R. Each rank holds 4 elements and needs 8, so it receives 16
bytes. The bound is a start, a latency for the one doubling of the group, and 16 times the seconds per byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.planning.cost import JUST_UNDER
from shardwise.planning.layout_graph import Codes, LayoutGraph

__all__ = ["Bounds", "apart", "needed_late", "splits"]

_ANY_OTHER_SHARD = 1 << 30  # a code that no layout has


class Bounds:
    """Lower bounds on leaving one layout: per mesh dim for a new placement there, and for the first mesh dims together.

    A bound is two figures in seconds: before the first byte, and for the bytes. A better bound on the bytes may replace
    the second.
    """

    def __init__(self, graph: LayoutGraph, source: Codes) -> None:
        self.source = source
        self._graph = graph
        self._settled = graph.settled(source) if graph.single else source
        self._least = graph.numel / graph.ranks * graph.itemsize
        self._steps: dict[tuple[int, int], tuple[float, float]] = {}
        self._prefixes: dict[Codes, tuple[float, float]] = {}

    def step(self, mesh_dim: int, code: int) -> tuple[float, float]:
        """A bound for every path after which a mesh dim has the placement ``code``; 0 when it has it now.

        Summed over the mesh dims, these bounds never exceed the path's cost. A collective over several mesh dims starts
        once. So the start is divided by the number of mesh dims that could share the collective.
        """
        known = self._steps.get((mesh_dim, code))
        if known is not None:
            return known
        here = self.source[mesh_dim]
        links = self._graph.costs.links
        if here == code:
            before = moving = 0.0
        elif self._graph.mesh_shape[mesh_dim] == 1:
            before, moving = links.local_start, 0.0
        elif here == 0:
            before, moving = links.local_start, self._least / links.memory_bandwidth
        else:
            n, start, latency, seconds_per_byte = self._graph.alone[mesh_dim]
            if here > 0:
                sharing = sum(other > 0 for other in self.source)
                rounds, nbytes = 1, (n - 1) / n * self._least / sharing if code > 0 else (n - 1) * self._least
            else:
                sharing = self.source.count(here)
                rounds = 1 if code else 2
                nbytes = rounds * (n - 1) * self._least
            before, moving = start / sharing + rounds * latency, nbytes * seconds_per_byte
        known = self._steps[mesh_dim, code] = before * JUST_UNDER, moving * JUST_UNDER
        return known

    def prefix(self, codes: Codes) -> tuple[float, float]:
        """A bound for every path after which the first mesh dims have the placements ``codes``.

        The first figure is seconds for the bytes that some rank must receive. The second is seconds before the first
        byte, for those mesh dims that must be undone and redone (see :func:`disturbed`).
        """
        known = self._prefixes.get(codes)
        if known is None:
            graph = self._graph
            moving = received(graph, self._settled, codes) * graph.fastest * graph.itemsize * JUST_UNDER
            before = 0.0
            for m in disturbed(graph.mesh_shape, self.source, codes):
                undo, _ = self.step(m, _ANY_OTHER_SHARD)
                before += undo + min(graph.alone[m][2], graph.costs.links.local_start) * JUST_UNDER
            known = self._prefixes[codes] = moving, before
        return known


def disturbed(mesh_shape: Sequence[int], source: Codes, goal: Codes) -> list[int]:
    """Mesh dims already placed as in the goal that must still be undone and redone.

    Only the right-most mesh dims of a tensor dim can leave it, and only a mesh dim right of them can join it. From
    [S(0), S(0)] to [R, S(0)], for example, mesh dim 1 must leave first and join again: the result is [1].
    """
    leftmost: dict[int, int] = {}  # by tensor dim, the first mesh dim that leaves or joins it
    redone = []
    for m, (here, there) in enumerate(zip(source, goal, strict=False)):
        if mesh_shape[m] == 1:
            continue
        if here == there:
            if here in leftmost:
                redone.append(m)
        else:
            if here > 0:
                leftmost.setdefault(here, m)
            if there > 0:
                leftmost.setdefault(there, m)
    return redone


def received(graph: LayoutGraph, source: Codes, goal: Codes) -> float:
    """A lower bound on the elements that some rank must receive until the first mesh dims are placed as in ``goal``.

    ``goal`` may be shorter than the layout; the later mesh dims may then have any placements. Mesh dims split from left
    to right. So the ranks of the later mesh dims together hold the part that the first ones leave to one rank, and each
    of them holds a piece of that part.

    Example: 8 elements on a (2, 2) mesh, from [S(0), R] to [R, S(0)]. The rank at (1, 0) holds the second half and
    needs the first one, so it receives 4 elements (see :func:`apart`).
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
    lacking = (needed - math.prod(map(min, before, after))) / later
    late = apart(splits(graph.mesh_shape, goal), source[: len(goal)])
    if late is None:
        return lacking
    return max(lacking, (needed if graph.is_even else needed_late(graph, goal, late)) / later)


def splits(mesh_shape: Sequence[int], layout: Codes) -> dict[int, list[int]]:
    """By the code of a shard, the mesh dims of several ranks that have it in a layout."""
    mesh_dims: dict[int, list[int]] = {}
    for m, code in enumerate(layout):
        if code > 0 and mesh_shape[m] > 1:
            mesh_dims.setdefault(code, []).append(m)
    return mesh_dims


def apart(goal: Mapping[int, Sequence[int]], layout: Codes) -> int | None:
    """A mesh dim of which the last rank holds, under ``layout``, nothing of its part under ``goal``.

    ``goal`` is in the form of :func:`splits`; the rank is the first one on all other mesh dims. There is such a mesh
    dim when the order of the mesh dims that split a tensor dim differs between the two. The rank has the last piece of
    the layout's split there and needs the first piece of the goal's, and these share nothing. ``None`` when there is no
    such mesh dim.
    """
    for code, mesh_dims in goal.items():
        position = 0
        for m, here in enumerate(layout):
            if here == code:
                if position == len(mesh_dims):
                    break
                if mesh_dims[position] != m:
                    return m
                position += 1
    return None


def needed_late(graph: LayoutGraph, goal: Codes, late: int) -> int:
    """Elements under ``goal`` of the rank that is last on the mesh dim ``late`` and first on all others."""
    sizes = list(graph.shape)
    for m, (n, there) in enumerate(zip(graph.mesh_shape, goal, strict=False)):
        if there > 0:
            size = sizes[there - 1]
            step = -(-size // n)
            sizes[there - 1] = max(size - step * (n - 1), 0) if m == late else step
    return math.prod(sizes)
