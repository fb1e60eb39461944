"""From times to figures: the alpha-beta line through what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from shardwise.cost import KINDS, Connection, Link, Links

__all__ = ["Line", "fit_line", "fit_links"]

Dims = tuple[int, ...]
#: Bytes and seconds of one measurement.
Point = tuple[float, float]

LEAST_START = 1e-7
"""Seconds: no call of a process group or a kernel returns sooner."""

LEAST_PER_BYTE = 1e-14
"""Seconds: 100 TB/s, faster than any memory; where times do not grow with bytes at all."""

ROUNDS = 30
"""Of reweighting; the line stands still well before that."""

SMALLEST_RESIDUAL = 1e-4
"""Relative; a point that lies closer than this weighs no more for it."""

START_SHARE = 0.5
"""How much of a line's start is paid once and not per doubling of the group, where one group alone cannot tell."""


@frozen
class Line:
    """Seconds before the first byte, and per byte."""

    start: float
    per_byte: float

    def at(self, nbytes: float) -> float:
        """The seconds for some bytes."""
        return self.start + nbytes * self.per_byte


def fit_line(points: Sequence[Point]) -> Line:
    """The line with the least sum of relative errors, both of its figures positive.

    Relative, because a plan compares microseconds with microseconds as often as seconds with seconds; the sum and not
    the squares, because a busy machine makes single times far too long and none too short.
    """
    weights = [1 / t**2 for _, t in points]
    line = _weighted(points, weights)
    for _ in range(ROUNDS):
        errors = [max(abs(line.at(x) / t - 1), SMALLEST_RESIDUAL) for x, t in points]
        line = _weighted(points, [1 / (t**2 * e) for (_, t), e in zip(points, errors, strict=True)])
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

    The bytes of a collective's points are those that a rank receives, as :class:`shardwise.cost.StepCosts` counts them;
    those of a copy's what it writes. Mesh dims of one rank, which are never measured, take the first measured one's.
    """
    lines = {key: fit_line(points) for key, points in collectives.items()}
    local = fit_line(copies)
    measured = [m for m, n in enumerate(mesh_shape) if n > 1]
    shares = {kind: _start_share(mesh_shape, lines, kind, measured) for kind in KINDS}

    def connection(m: int) -> Connection:
        return Connection(**{kind: _link(lines[kind, (m,)], kind, mesh_shape[m], shares[kind]) for kind in KINDS})

    found = {m: connection(m) for m in measured}
    dims = tuple(found.get(m) or found[measured[0]] for m in range(len(mesh_shape)))
    return Links(dims, local.start, 1 / local.per_byte)


def _start_share(
    mesh_shape: Sequence[int], lines: Mapping[tuple[str, Dims], Line], kind: str, measured: Sequence[int]
) -> float:
    """The part of a start that a group of several mesh dims pays once, so that the group of all takes what it took."""
    together = lines.get((kind, tuple(measured)))
    if len(measured) < 2 or together is None:  # noqa: PLR2004  # one mesh dim is no several
        return START_SHARE
    starts = [lines[kind, (m,)].start for m in measured]
    doublings = [(mesh_shape[m] - 1).bit_length() for m in measured]
    slowest = max(starts)
    all_paid = sum(doublings) * max(s / d for s, d in zip(starts, doublings, strict=True))
    # share * slowest + (1 - share) * all_paid = together
    share = (all_paid - together.start) / (all_paid - slowest) if all_paid > slowest else START_SHARE
    return min(max(share, 0.05), 0.95)


def _link(line: Line, kind: str, size: int, share: float) -> Link:
    # An all-reduce pays its latency twice.
    rounds = (size - 1).bit_length() * (2 if kind == "all_reduce" else 1)
    return Link(share * line.start, (1 - share) * line.start / rounds, 1 / line.per_byte)
