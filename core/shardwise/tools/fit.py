"""From measured times to the figures of the cost model: a line per kind of collective, with a start and a bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from shardwise.planning.cost import KINDS, Connection, Link, Links

__all__ = ["Line", "Point", "fit_line", "fit_links"]

Dims = tuple[int, ...]
Point = tuple[float, float]
"""Bytes and seconds of one measurement."""

LEAST_START = 1e-7
"""Seconds: no call of a process group or a kernel returns sooner."""

LEAST_PER_BYTE = 1e-14
"""Seconds. It stands for 100 TB/s, faster than any memory, where times do not grow with bytes at all."""

ROUNDS = 40
"""Rounds of refinement; the line no longer changes well before the last one."""

LONGEST_STEP = 0.5
"""The largest change of a logarithm in one round: far from the line, tangents mislead."""

START_SHARE = 0.5
"""The share of a line's start that is paid once, not per doubling of the group, if only one group was measured."""


@frozen
class Line:
    """Seconds before the first byte, and per byte."""

    start: float
    per_byte: float

    def at(self, nbytes: float) -> float:
        """The seconds for some bytes."""
        return self.start + nbytes * self.per_byte


def fit_line(points: Sequence[Point]) -> Line:
    """The line with the least squares of the logarithms of its ratios to the times, both of its figures positive.

    Ratios, because a plan compares microseconds with microseconds as often as seconds with seconds, and because twice
    too much is as wrong as half.
    """
    line = _weighted(points, [1 / t**2 for _, t in points])
    for _ in range(ROUNDS):
        # Newton's steps, each a weighted line through where the tangents of the logarithms lead.
        now = [line.at(x) for x, _ in points]
        aims = [
            (x, m * (1 + min(max(math.log(t / m), -LONGEST_STEP), LONGEST_STEP)))
            for m, (x, t) in zip(now, points, strict=True)
        ]
        line = _weighted(aims, [1 / m**2 for m in now])
    return line


def _weighted(points: Sequence[Point], weights: Sequence[float]) -> Line:
    """Weighted least squares; a figure that would not be positive takes its least value and the other is fitted."""
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    product = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True))
    slope = product / spread if spread else 0.0
    if slope < LEAST_PER_BYTE:
        return Line(max(mean_t, LEAST_START), LEAST_PER_BYTE)
    start = mean_t - slope * mean_x
    if start >= LEAST_START:
        return Line(start, slope)
    squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    through = sum(w * x * (t - LEAST_START) for w, (x, t) in zip(weights, points, strict=True))
    return Line(LEAST_START, max(through / squares, LEAST_PER_BYTE))


# -- a whole mesh ----------------------------------------------------------------------------------------------------


def fit_links(
    mesh_shape: Sequence[int], collectives: Mapping[tuple[str, Dims], Sequence[Point]], copies: Sequence[Point]
) -> Links:
    """The figures of a mesh from times of each kind over each mesh dim alone and over all of them, and of copies.

    The bytes of a collective's points are those that a rank receives, as :class:`shardwise.planning.cost.StepCosts`
    counts them. The bytes of a copy are those that it writes. A mesh dim of one rank is never measured: it gets the
    figures of the first measured one.
    """
    lines = {key: fit_line(points) for key, points in collectives.items()}
    local = fit_line(copies)
    measured = [m for m, n in enumerate(mesh_shape) if n > 1]
    shares = {kind: _start_share(mesh_shape, lines, kind, measured) for kind in KINDS}
    connections = {
        m: Connection(**{k: _link(lines[k, (m,)], k, [mesh_shape[m]], shares[k] * lines[k, (m,)].start) for k in KINDS})
        for m in measured
    }
    dims = tuple(connections.get(m) or connections[measured[0]] for m in range(len(mesh_shape)))
    whole = None
    if len(measured) > 1:
        # The start is that of the slowest mesh dim. So whatever the mesh dims do not explain is latency.
        starts = {k: max(connections[m].of(k).start for m in measured) for k in KINDS}
        sizes = [mesh_shape[m] for m in measured]
        whole = Connection(**{k: _link(lines[k, tuple(measured)], k, sizes, starts[k]) for k in KINDS})
    return Links(dims, _rounded(local.start), _rounded(1 / local.per_byte), whole)


def _start_share(
    mesh_shape: Sequence[int], lines: Mapping[tuple[str, Dims], Line], kind: str, measured: Sequence[int]
) -> float:
    """The part of a start that a group of several mesh dims pays once; the group of all mesh dims determines it."""
    if len(measured) == 1:
        return START_SHARE
    all_dims = lines[kind, tuple(measured)]
    starts = [lines[kind, (m,)].start for m in measured]
    doublings = [_doublings(mesh_shape[m]) for m in measured]
    slowest = max(starts)
    all_paid = sum(doublings) * max(s / d for s, d in zip(starts, doublings, strict=True))
    # share * slowest + (1 - share) * all_paid = all_dims.start
    share = (all_paid - all_dims.start) / (all_paid - slowest) if all_paid > slowest else START_SHARE
    return min(max(share, 0.05), 0.95)


def _rounded(figure: float) -> float:
    """Four digits: more than any clock gives, and short enough to read in the file."""
    return float(f"{figure:.4g}")


def _doublings(size: int) -> int:
    return (size - 1).bit_length()


def _link(line: Line, kind: str, sizes: Sequence[int], start: float) -> Link:
    """The figures of a group over mesh dims of these sizes. The line's constant, without ``start``, is latency."""
    # An all-reduce pays its latency twice.
    rounds = sum(map(_doublings, sizes)) * (2 if kind == "all_reduce" else 1)
    latency = max(line.start - start, LEAST_START) / rounds
    return Link(_rounded(start), _rounded(latency), _rounded(1 / line.per_byte))
