"""Fitting: times made by known figures give those figures back."""

import random

import pytest
from attrs import astuple
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.cost import KINDS, Connection, Link, Links, step_costs
from shardwise.tools.fit import fit_line, fit_links

SIZES = [4096 * 8**k for k in range(5)]
starts = st.floats(1e-6, 1e-2)
per_bytes = st.floats(1e-12, 1e-8)


@given(starts, per_bytes)
def test_a_line_is_found_again(start, per_byte):
    line = fit_line([(x, start + per_byte * x) for x in SIZES])
    assert line.start == pytest.approx(start, rel=1e-3)
    for x in SIZES:
        assert line.at(x) == pytest.approx(start + per_byte * x, rel=1e-3)


@given(starts, per_bytes, st.integers(0, 1000))
def test_noise_moves_a_line_no_more_than_it_moves_the_times(start, per_byte, seed):
    noise = random.Random(seed)  # noqa: S311  # no secret
    points = [(x, (start + per_byte * x) * noise.uniform(0.9, 1.1)) for x in SIZES * 3]
    line = fit_line(points)
    for x in SIZES:
        assert line.at(x) == pytest.approx(start + per_byte * x, rel=0.25)


@pytest.mark.parametrize(
    "points",
    [
        [(4096, 8e-3), (32768, 6e-3), (1 << 18, 4e-3)],  # the more bytes, the faster
        [(4096, 1e-6), (1 << 20, 1e-3), (1 << 21, 9e-3)],  # a start below nothing
        [(4096, 1e-3)],
        [(4096, 1e-3), (4096, 3e-3)],
    ],
)
def test_figures_are_positive_whatever_was_measured(points):
    assert all(figure > 0 for figure in astuple(fit_line(points)))


def test_twice_too_much_is_as_wrong_as_half():
    """A curve, as copies are that outgrow the cache: the line must not leave out its ends."""
    points = [(4096, 1e-6), (32768, 2e-6), (1 << 18, 7e-6), (1 << 21, 150e-6), (1 << 24, 6500e-6)]
    line = fit_line(points)
    ratios = [line.at(x) / t for x, t in points]
    assert max(ratios) < 8
    assert min(ratios) > 1 / 8


def times(costs, dims, n):
    """Points of every kind over one group, by the model."""
    pieces = [size // 4 for size in SIZES]
    points = {("all_reduce", dims): [(2 * (n - 1) * p, costs.all_reduce(dims, n * p)) for p in pieces]}
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        points[kind, dims] = [((n - 1) * p, getattr(costs, kind)(dims, p)) for p in pieces]
    return points


def alike(one, other, rel):
    for kind in KINDS:
        assert astuple(one.of(kind)) == pytest.approx(astuple(other.of(kind)), rel=rel)


def test_the_figures_of_a_mesh_are_found_again():
    figures = Connection(*(Link(2e-5 * k, 1e-5 * k, 1e9 * k) for k in (1, 2, 3, 4)))
    shape, links = (2, 1, 4), Links((figures,) * 3, 3e-6, 5e9)
    costs = step_costs(shape, links)
    points = {**times(costs, (0,), 2), **times(costs, (2,), 4), **times(costs, (0, 2), 8)}
    found = fit_links(shape, points, [(x, costs.copy(x)) for x in SIZES])
    for dims, n in (((0,), 2), ((2,), 4), ((0, 2), 8)):
        fitted = times(step_costs(shape, found), dims, n)
        for key, expected in times(costs, dims, n).items():
            assert [t for _, t in fitted[key]] == pytest.approx([t for _, t in expected], rel=0.01), key
    assert (found.local_start, found.memory_bandwidth) == pytest.approx((3e-6, 5e9), rel=1e-3)
    assert found.mesh_dims[1] == found.mesh_dims[0]


def test_the_figures_of_one_mesh_dim_share_the_start():
    figures = Connection.same(Link(2e-5, 2e-5, 1e9))
    costs = step_costs((2,), Links((figures,), 1e-6, 1e10))
    links = fit_links((2,), times(costs, (0,), 2), [(x, costs.copy(x)) for x in SIZES])
    # Half of what precedes the first byte is the start; an all-reduce has two latencies in it.
    alike(links.mesh_dims[0], Connection(*[figures.all_gather] * 4), rel=0.5)
    assert links.whole is None
    again = step_costs((2,), links)
    for kind in KINDS:
        for nbytes in SIZES:
            assert getattr(again, kind)((0,), nbytes) == pytest.approx(getattr(costs, kind)((0,), nbytes), rel=1e-3)


def test_a_crowded_group_keeps_what_it_took():
    """Four ranks on two cores are far slower than two and two."""
    pair, crowd = Connection.same(Link(1e-4, 1e-4, 1e9)), Connection.same(Link(4e-3, 5e-4, 5e8))
    costs = step_costs((2, 2), Links((pair, pair), 1e-6, 1e10, crowd))
    points = {**times(costs, (0,), 2), **times(costs, (1,), 2), **times(costs, (0, 1), 4)}
    again = step_costs((2, 2), fit_links((2, 2), points, [(x, costs.copy(x)) for x in SIZES]))
    for kind in KINDS:
        for dims in ((0,), (1,), (0, 1)):
            for nbytes in SIZES:
                assert getattr(again, kind)(dims, nbytes) == pytest.approx(getattr(costs, kind)(dims, nbytes), rel=0.02)
