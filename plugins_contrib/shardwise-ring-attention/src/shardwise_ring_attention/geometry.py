"""Which rank computes which scores: ranges of positions, and the pieces of a block under a causal mask.

A rank holds some ranges of positions, one behind the other in memory. A causal mask lets query ``i`` see the keys up to
``i``, both counted from the start of their sequence, as ``scaled_dot_product_attention(is_causal=True)`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from attrs import evolve, frozen

__all__ = ["Piece", "Range", "Ranges", "area", "balanced", "length", "overlaps", "pieces"]

Range = tuple[int, int]
# Ascending and disjoint; a rank's local tensor has them one behind the other.
Ranges = tuple[Range, ...]


@frozen
class Piece:
    """A rectangle of scores, by local positions of queries and keys; of a ``causal`` one, a square, half counts."""

    queries: Range
    keys: Range
    causal: bool = False

    @property
    def area(self) -> int:
        """How many scores there are."""
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def length(ranges: Ranges) -> int:
    """How many positions there are."""
    return sum(stop - start for start, stop in ranges)


def area(parts: Sequence[Piece]) -> int:
    """How many scores there are in some pieces: what their attention costs."""
    return sum(piece.area for piece in parts)


def overlaps(some: Ranges, others: Ranges) -> list[Range]:
    """The positions that two ranks' ranges share, ascending."""
    shared = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return sorted((start, stop) for start, stop in shared if start < stop)


def balanced(span: Range, ranks: int) -> tuple[Ranges, ...]:
    """Ranges by rank that share the work of a causal mask evenly.

    Of ``2 * ranks`` chunks each rank has one from the front and one from the back.
    """
    start, stop = span
    marks = [start + (stop - start) * c // (2 * ranks) for c in range(2 * ranks + 1)]
    chunks = list(pairwise(marks))
    pairs = ((chunks[i], chunks[-1 - i]) for i in range(ranks))
    return tuple(tuple((a, b) for a, b in pair if a < b) for pair in pairs)


def pieces(queries: Ranges, keys: Ranges, *, causal: bool) -> tuple[Piece, ...]:
    """The scores of these queries and keys that the mask leaves, as rectangles and squares under a diagonal."""
    scores: list[Piece] = []
    for first_query, rows in _local(queries):
        for first_key, columns in _local(keys):
            parts = _under_diagonal(rows, columns) if causal else iter([Piece(rows, columns)])
            for part in parts:
                _append(
                    scores,
                    evolve(
                        part,
                        queries=_moved(part.queries, first_query - rows[0]),
                        keys=_moved(part.keys, first_key - columns[0]),
                    ),
                )
    return tuple(scores)


def _local(ranges: Ranges) -> Iterator[tuple[int, Range]]:
    """Each range with its place in local memory."""
    at = 0
    for start, stop in ranges:
        yield at, (start, stop)
        at += stop - start


def _moved(positions: Range, by: int) -> Range:
    return positions[0] + by, positions[1] + by


def _under_diagonal(queries: Range, keys: Range) -> Iterator[Piece]:
    """The part of one rectangle that a causal mask leaves: whole columns, a square on the diagonal, whole rows."""
    first, last = queries
    before, end = keys[0], min(keys[1], last)
    whole = min(max(first, before), end)  # keys that all these queries see
    if before < whole:
        yield Piece(queries, (before, whole))
    top = max(first, whole)
    if whole < end:
        yield Piece((top, end), (top, end), causal=True)
        if end < last:
            yield Piece((end, last), (top, end))


def _append(scores: list[Piece], piece: Piece) -> None:
    """Add a piece; join it to the one before if both make one rectangle, since each call of a kernel costs."""
    last = scores[-1] if scores else None
    if last is None or last.causal or piece.causal:
        scores.append(piece)
    elif last.queries == piece.queries and last.keys[1] == piece.keys[0]:
        scores[-1] = Piece(piece.queries, (last.keys[0], piece.keys[1]))
    elif last.keys == piece.keys and last.queries[1] == piece.queries[0]:
        scores[-1] = Piece((last.queries[0], piece.queries[1]), piece.keys)
    else:
        scores.append(piece)
