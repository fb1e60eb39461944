import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost import Link, Links, default_links, links_of, step_costs, use_links
from shardwise.spec import AbstractMesh

FAST = Link(start=1e-5, latency=1e-6, bandwidth=1e11)
SLOW = Link(start=2e-5, latency=1e-5, bandwidth=1e10)
LINKS = Links((FAST, SLOW, FAST), local_start=1e-6, memory_bandwidth=1e12)
SIZES = (2, 4, 2)


@pytest.fixture
def costs():
    return step_costs(SIZES, LINKS)


@settings(deadline=None)
@given(nbytes=st.integers(0, 1 << 40), dims=st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)]))
def test_every_step_costs_more_than_nothing(nbytes, dims):
    costs = step_costs(SIZES, LINKS)
    for step in (costs.all_gather, costs.reduce_scatter, costs.all_reduce, costs.all_to_all):
        assert step(dims, nbytes) > 0
        assert step(dims, nbytes + 1024) >= step(dims, nbytes)
    assert costs.copy(nbytes) > 0


def test_an_all_gather_is_start_latency_and_received_bytes(costs):
    assert costs.all_gather((0,), 1000) == pytest.approx(1e-5 + 1e-6 + 1000 / 1e11)
    assert costs.all_gather((1,), 1000) == pytest.approx(2e-5 + 2 * 1e-5 + 3 * 1000 / 1e10)


def test_a_group_is_as_slow_as_its_slowest_link(costs):
    assert costs.all_gather((0, 1), 1000) == pytest.approx(2e-5 + 3 * 1e-5 + 7 * 1000 / 1e10)


def test_an_all_reduce_costs_a_scatter_and_a_gather_but_one_start(costs):
    both = costs.reduce_scatter((1,), 250) + costs.all_gather((1,), 250)
    assert costs.all_reduce((1,), 1000) == pytest.approx(both - SLOW.start)


def test_one_collective_over_two_like_mesh_dims_beats_two():
    costs = step_costs((2, 2), Links((FAST, FAST), 1e-6, 1e12))
    assert costs.all_reduce((0, 1), 1 << 20) < costs.all_reduce((0,), 1 << 20) + costs.all_reduce((1,), 1 << 20)
    assert costs.all_gather((0, 1), 1 << 20) < costs.all_gather((1,), 1 << 20) + costs.all_gather((0,), 1 << 21)


def test_no_group_is_cheaper_than_its_mesh_dims_alone(costs):
    _, start, latency, per_byte = costs.alone(1)
    assert costs.all_gather((0, 1), 0) >= start + latency + costs.alone(0)[2]
    assert costs.all_gather((0, 1), 1) - costs.all_gather((0, 1), 0) >= 7 * per_byte * (1 - 1e-6)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_defaults_are_alike_on_every_mesh_dim(device_type):
    links = default_links(AbstractMesh((2, 3, 4), device_type))
    assert len(links.mesh_dims) == 3
    assert len(set(links.mesh_dims)) == 1


def test_defaults_know_that_an_accelerator_is_faster():
    cpu, cuda = (default_links(AbstractMesh((2,), d)) for d in ("cpu", "cuda"))
    assert cuda.mesh_dims[0].bandwidth > cpu.mesh_dims[0].bandwidth
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
