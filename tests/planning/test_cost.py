import itertools

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.planning.cost import (
    KINDS,
    WIRES,
    Connection,
    Link,
    Links,
    default_links,
    links_of,
    step_costs,
    use_links,
)

FAST = Link(start=1e-5, latency=1e-6, bandwidth=1e11)
SLOW = Link(start=2e-5, latency=1e-5, bandwidth=1e10)
LINKS = Links((FAST, SLOW, FAST), local_start=1e-6, memory_bandwidth=1e12)
SIZES = (2, 4, 2)
GROUPS = [dims for size in (1, 2, 3) for dims in itertools.combinations(range(3), size)]


@pytest.fixture
def costs():
    return step_costs(SIZES, LINKS)


def positive(low, high):
    return st.floats(low, high, allow_nan=False)


any_link = st.builds(Link, positive(1e-7, 1e-2), positive(1e-7, 1e-2), positive(1e6, 1e12))
any_connection = st.builds(Connection, *[any_link] * 4)
links_of_any_kind = st.builds(
    Links, st.tuples(*[any_connection] * 3), positive(1e-7, 1e-4), positive(1e8, 1e13), st.none() | any_connection
)
some_bytes = st.integers(0, 1 << 40)
some_groups = st.sampled_from(GROUPS)


def every_collective(costs):
    return [*(getattr(costs, kind) for kind in KINDS), costs.all_reduce_by_moving]


# -- laws -----------------------------------------------------------------------------------------------------------


@given(links_of_any_kind, some_bytes, some_groups)
def test_every_step_costs_more_than_nothing_and_more_for_more(links, nbytes, dims):
    costs = step_costs(SIZES, links)
    for step in every_collective(costs):
        assert step(dims, nbytes) > 0
        assert step(dims, nbytes + 1024) >= step(dims, nbytes)
    assert costs.copy(nbytes) > 0


@given(links_of_any_kind, st.integers(0, 1 << 40), some_groups)
def test_no_group_is_cheaper_than_its_mesh_dims_alone(links, nbytes, dims):
    """What the estimates of the search rest on; see ``StepCosts.alone``."""
    costs = step_costs(SIZES, links)
    alone = [costs.alone(m) for m in dims]
    n = 1
    for m in dims:
        n *= SIZES[m]
    start, latency = max(a[1] for a in alone), sum(a[2] for a in alone)
    per_byte = max(a[3] for a in alone)
    almost = 1 - 1e-9
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert getattr(costs, kind)(dims, nbytes) >= (start + latency + (n - 1) * nbytes * per_byte) * almost
    for reduce in (costs.all_reduce, costs.all_reduce_by_moving):
        assert reduce(dims, nbytes) >= (start + 2 * latency + 2 * (n - 1) / n * nbytes * per_byte) * almost


@given(links_of_any_kind, some_bytes, some_groups, st.integers(0, 2))
def test_a_group_with_a_mesh_dim_more_costs_no_less(links, nbytes, dims, more):
    """Else a detour, which takes a mesh dim into a reduction that has nothing to reduce there, would pay."""
    costs = step_costs(SIZES, links)
    wider = tuple(sorted({*dims, more}))
    for reduce in (costs.all_reduce, costs.all_reduce_by_moving):
        assert reduce(wider, nbytes) >= reduce(dims, nbytes) * (1 - 1e-9)


# -- the formulas ---------------------------------------------------------------------------------------------------


def test_an_all_gather_is_start_latency_and_received_bytes(costs):
    assert costs.all_gather((0,), 1000) == pytest.approx(1e-5 + 1e-6 + 1000 / 1e11)
    assert costs.all_gather((1,), 1000) == pytest.approx(2e-5 + 2 * 1e-5 + 3 * 1000 / 1e10)


def test_a_group_is_as_slow_as_its_slowest_link(costs):
    assert costs.all_gather((0, 1), 1000) == pytest.approx(2e-5 + 3 * 1e-5 + 7 * 1000 / 1e10)


def test_an_all_reduce_costs_a_scatter_and_a_gather_but_one_start(costs):
    both = costs.reduce_scatter((1,), 250) + costs.all_gather((1,), 250)
    assert costs.all_reduce((1,), 1000) == pytest.approx(both - SLOW.start)


def test_a_reduction_that_no_backend_does_costs_what_is_run_for_it(costs):
    large, small = 1 << 24, 64
    parts = costs.reduce_scatter((1,), large // 4) + costs.all_gather((1,), large // 4)
    assert costs.all_reduce_by_moving((1,), large) == pytest.approx(parts)
    gathered = costs.all_gather((1,), small) + costs.copy(small)
    assert costs.all_reduce_by_moving((1,), small) == pytest.approx(max(gathered, SLOW.start + 4 * SLOW.latency), 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_figures_of_its_own(kind):
    slower = evolve(Connection.same(FAST), **{kind: SLOW})
    costs, fast = (step_costs((4,), Links((c,), 1e-6, 1e12)) for c in (slower, FAST))
    for other in KINDS:
        same = getattr(costs, other)((0,), 4096) == getattr(fast, other)((0,), 4096)
        assert same == (other != kind)


def test_the_group_of_all_ranks_may_be_slower_than_its_mesh_dims_let_expect(costs):
    crowded = Link(start=1e-3, latency=1e-9, bandwidth=1e9)
    slow = step_costs(SIZES, evolve(LINKS, whole=Connection.same(crowded)))
    # The start and the bandwidth of the whole, and the latency of a mesh dim, which is longer.
    assert slow.all_gather((0, 1, 2), 1000) == pytest.approx(1e-3 + 4 * 1e-5 + 15 * 1000 / 1e9)
    assert slow.all_gather((0, 1), 1000) == costs.all_gather((0, 1), 1000)


def test_one_collective_over_two_like_mesh_dims_beats_two():
    costs = step_costs((2, 2), Links((FAST, FAST), 1e-6, 1e12))
    assert costs.all_reduce((0, 1), 1 << 20) < costs.all_reduce((0,), 1 << 20) + costs.all_reduce((1,), 1 << 20)
    assert costs.all_gather((0, 1), 1 << 20) < costs.all_gather((1,), 1 << 20) + costs.all_gather((0,), 1 << 21)


# -- figures in use -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_defaults_are_alike_on_every_mesh_dim_inside_a_host(device_type):
    links = default_links(AbstractMesh((2, 3, 4), device_type))
    assert len(links.mesh_dims) == 3
    assert len(set(links.mesh_dims)) == 1


def test_defaults_know_what_connects_the_ranks_of_a_mesh_dim():
    links = default_links(AbstractMesh((2, 8), "cuda"), ("infiniband", "nvlink"))
    between, inside = (c.all_gather for c in links.mesh_dims)
    assert between.bandwidth < inside.bandwidth
    assert between.latency > inside.latency
    assert links.mesh_dims == (WIRES["infiniband"], WIRES["nvlink"])


def test_defaults_know_that_an_accelerator_is_faster():
    cpu, cuda = (default_links(AbstractMesh((2,), d)) for d in ("cpu", "cuda"))
    assert cuda.mesh_dims[0].all_gather.bandwidth > cpu.mesh_dims[0].all_gather.bandwidth
    assert cuda.memory_bandwidth > cpu.memory_bandwidth


def test_links_are_set_per_mesh_and_taken_back():
    mesh, other = AbstractMesh(SIZES), AbstractMesh((2, 4))
    use_links(mesh, LINKS)
    try:
        assert links_of(mesh) is LINKS
        assert links_of(other) == default_links(other)
    finally:
        use_links(mesh, None)
    assert links_of(mesh) == default_links(mesh)


@pytest.mark.parametrize("bad", [{"start": 0.0}, {"latency": -1.0}, {"bandwidth": 0.0}])
def test_a_link_is_positive(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Link(**{"start": 1e-5, "latency": 1e-6, "bandwidth": 1e9, **bad})
