"""The parts that a bound on a step is made of: never more than the costs that they are parts of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.cost import links_of, links_of_wires, step_costs, use_links
from shardwise.planning.path import path_cost
from shardwise.program.cheap_moves import CheapMoves
from shardwise.program.cost_graph import FORBIDDEN
from shardwise.program.step_bound import split


@given(st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=2, max_size=4))
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


@st.composite
def moves(draw):
    mesh = AbstractMesh(tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8, 16]), min_size=1, max_size=3))))
    shape = tuple(draw(st.lists(st.sampled_from([1, 5, 16, 64, 1024, 4096]), min_size=1, max_size=3)))
    placement = st.sampled_from([REPLICATE, partial("sum"), *(shard(d) for d in range(len(shape)))])
    wires = [draw(st.sampled_from(["loopback", "nvlink", "infiniband", "ethernet"])) for _ in mesh.shape]
    src, dst = (tuple(draw(placement) for _ in mesh.shape) for _ in range(2))
    return mesh, wires, TensorMeta.contiguous(shape, torch.float32), src, dst


@given(moves())
def test_no_path_is_cheaper_than_a_cheap_move(case):
    mesh, wires, meta, src, dst = case
    try:
        use_links(mesh, links_of_wires(mesh, wires))
        cheap = CheapMoves(step_costs(tuple(mesh.shape), links_of(mesh))).seconds(meta.nbytes, src, dst)
        assert cheap <= path_cost(TensorSpec(mesh, src, meta), TensorSpec(mesh, dst, meta))
    finally:
        use_links(mesh, None)
