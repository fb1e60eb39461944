"""The parts that a bound on a step is made of: never more than the costs that they are parts of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.cost import links_of, links_of_wires, step_costs, use_links
from shardwise.planning.path import path_cost
from shardwise.program.cheap_moves import CheapMoves
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.step_parts import Factor, raised, split


@given(st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=2, max_size=4))
@example(5, [4, 4, 4, 5])  # thirds and quarters of the cost at the place do not add up to it exactly
def test_parts_add_up_to_no_more_than_the_whole(seed, shape):
    random = np.random.default_rng(seed)
    costs = random.choice([0.0, 3.0, 10.0, 1e6, float(FORBIDDEN)], shape) + random.random(shape)
    at = tuple(int(random.integers(n)) for n in shape)
    costs[at] = random.random() * 100
    parts = split(costs, at)
    total = sum(part.reshape([-1 if k == m else 1 for k in range(costs.ndim)]) for m, part in enumerate(parts))
    assert (total <= costs + 1e-6).all()
    assert sum(part[i] for part, i in zip(parts, at, strict=True)) == pytest.approx(costs[at])


def test_parts_of_a_sum_are_its_terms():
    terms = np.array([5.0, 1.0, 7.0]), np.array([2.0, 9.0])
    parts = split(np.add.outer(*terms), (1, 0))
    np.testing.assert_allclose(parts[0] - parts[0][1], terms[0] - terms[0][1])
    np.testing.assert_allclose(parts[1] - parts[1][0], terms[1] - terms[1][0])


def sum_of(parts):
    return sum(part.reshape([-1 if k == m else 1 for k in range(len(parts))]) for m, part in enumerate(parts))


@given(st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_raised_parts_come_closer_and_are_never_more_than_the_whole(seed, shape):
    random = np.random.default_rng(seed)
    costs = random.choice([0.0, 3.0, 10.0, 1e6], shape) + random.random(shape)
    parts = split(costs, tuple(int(random.integers(n)) for n in shape))
    for turn in range(4):
        uses = {tuple(int(random.integers(n)) for n in shape): float(random.integers(1, 4)) for _ in range(turn + 1)}
        before, parts = parts, raised(costs, parts, uses, random.random(), turn % len(shape))
        assert (sum_of(parts) <= costs + 1e-6).all()
        if len(uses) == 1:
            (at,) = uses
            assert sum_of(parts)[at] >= sum_of(before)[at] - 1e-6


def test_parts_that_are_raised_all_the_way_are_the_cost():
    costs = np.array([[0.0, 5.0], [5.0, 20.0]])
    parts = split(costs, (0, 0))
    assert sum_of(parts)[1, 1] == pytest.approx(10)
    for place in [(1, 1), (0, 1), (0, 0)]:
        assert sum_of(raised(costs, parts, {place: 1.0}, 1.0))[place] == pytest.approx(costs[place])


@given(st.integers(0, 10**6), st.lists(st.integers(2, 5), min_size=2, max_size=3))
def test_a_factor_learns_costs_and_stays_below_them(seed, shape):
    """Kinds with one code are told apart only when the cost of one is asked for."""
    random = np.random.default_rng(seed)
    exact = np.floor(random.random(shape) * 100) + 10
    codes = [random.integers(0, 2, n) for n in shape]
    low = np.full([2] * len(shape), np.inf)
    for kinds in np.ndindex(*shape):
        code = tuple(of[k] for of, k in zip(codes, kinds, strict=True))
        low[code] = min(low[code], exact[kinds])
    low[np.isinf(low)] = 0
    at = tuple(int(of[0]) for of in codes)
    factor = Factor(low, split(low, at), [np.arange(n) for n in shape], codes, lambda k: exact[tuple(k)], 120.0)
    for turn in range(6):
        asked = tuple(int(random.integers(n)) for n in shape)
        factor.raise_at({asked: 1 + turn}, 1.0, turn % len(shape))
        assert (sum_of(factor.arrays()) <= exact).all()
        assert sum_of(factor.arrays())[asked] >= exact[asked] - len(shape) or turn
        assert factor.missing(asked) == exact[asked] - sum_of(factor.arrays())[asked]


@st.composite
def moves(draw):
    mesh = AbstractMesh(tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8, 16]), min_size=1, max_size=3))))
    shape = tuple(draw(st.lists(st.sampled_from([1, 5, 16, 64, 1024, 4096]), min_size=1, max_size=3)))
    placement = st.sampled_from([REPLICATE, partial("sum"), *(shard(d) for d in range(len(shape)))])
    wires = [draw(st.sampled_from(["loopback", "nvlink", "infiniband", "ethernet"])) for _ in mesh.shape]
    src, dst = (tuple(draw(placement) for _ in mesh.shape) for _ in range(2))
    return mesh, wires, TensorMeta.contiguous(shape, torch.float32), src, dst


@pytest.mark.slow
@pytest.mark.sample
@given(moves())
def test_no_path_is_cheaper_than_a_cheap_move(case):
    mesh, wires, meta, src, dst = case
    try:
        use_links(mesh, links_of_wires(mesh, wires))
        cheap = CheapMoves(step_costs(tuple(mesh.shape), links_of(mesh))).seconds(meta.nbytes, src, dst)
        assert cheap <= path_cost(TensorSpec(mesh, src, meta), TensorSpec(mesh, dst, meta))
    finally:
        use_links(mesh, None)
