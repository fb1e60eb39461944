"""Ranges and pieces: every score that the mask leaves is in exactly one piece."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import contiguous_work

from shardwise_ring_attention.geometry import Piece, area, balanced, length, overlaps, pieces

marks = st.lists(st.integers(0, 12), min_size=2, max_size=6, unique=True).map(sorted)


@st.composite
def ranges(draw):
    found = draw(marks)
    return tuple(zip(found[::2], found[1::2], strict=False))


def positions(held):
    return [i for start, stop in held for i in range(start, stop)]


@settings(deadline=None)
@given(ranges(), ranges(), st.booleans())
def test_pieces_cover_what_the_mask_leaves_once(queries, keys, causal):
    counted = torch.zeros(length(queries), length(keys), dtype=torch.int64)
    found = pieces(queries, keys, causal=causal)
    for piece in found:
        (a, b), (c, d) = piece.queries, piece.keys
        assert not piece.causal or b - a == d - c
        ones = torch.ones(b - a, d - c, dtype=torch.int64)
        counted[a:b, c:d] += ones.tril() if piece.causal else ones
    rows, columns = torch.tensor(positions(queries))[:, None], torch.tensor(positions(keys))[None]
    expected = (columns <= rows) if causal else torch.ones_like(counted, dtype=torch.bool)
    assert torch.equal(counted, expected.long())
    assert area(found) == int(expected.sum())


def test_neighbours_are_one_piece():
    assert pieces(((4, 6), (8, 10)), ((0, 2),), causal=True) == (Piece((0, 4), (0, 2)),)
    assert pieces(((8, 10),), ((0, 2), (4, 6)), causal=True) == (Piece((0, 2), (0, 4)),)
    assert pieces(((0, 3),), ((0, 3),), causal=True) == (Piece((0, 3), (0, 3), causal=True),)


@settings(deadline=None)
@given(ranges(), ranges())
def test_overlaps_are_the_shared_positions(some, others):
    assert positions(overlaps(some, others)) == sorted(set(positions(some)) & set(positions(others)))


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 40), st.integers(1, 6))
def test_balanced_ranges_share_out_all_positions(start, size, ranks):
    found = balanced((start, start + size), ranks)
    assert len(found) == ranks
    assert sorted(i for held in found for i in positions(held)) == list(range(start, start + size))
    assert max(map(length, found)) - min(map(length, found)) <= 2


def work(found, *, causal=True):
    return [sum(area(pieces(queries, keys, causal=causal)) for keys in found) for queries in found]


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8))
def test_balanced_ranges_make_equal_work_of_whole_chunks_in_every_step(ranks, chunk):
    found = balanced((0, 2 * ranks * chunk), ranks)
    for step in range(ranks):
        done = {area(pieces(found[i], found[(i - step) % ranks], causal=True)) for i in range(ranks)}
        assert len(done) == 1


def test_contiguous_ranges_make_unequal_work():
    even, uneven = work(balanced((0, 1000), 4)), contiguous_work(1000, 4)
    assert sum(even) == sum(uneven) == 1000 * 1001 // 2
    assert max(even) * 4 / sum(even) < 1.01
    assert max(uneven) * 4 / sum(uneven) > 1.7
