"""The costs of all paths, beside the search that finds one of them."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard, strided_shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.cost import links_of, links_of_wires, use_links
from shardwise.planning.layout_graph import decode, graph_of
from shardwise.planning.path import path_cost
from shardwise.planning.path_table import PathTable

ANY_SHAPE = st.lists(st.sampled_from([1, 5, 16, 64, 1024, 4096]), min_size=1, max_size=3)
ANY_DTYPE = st.sampled_from([torch.float32, torch.int64, torch.bool])


def table_of(mesh, shape, dtype=torch.float32):
    spec = TensorSpec(mesh, (REPLICATE,) * mesh.ndim, TensorMeta.contiguous(tuple(shape), dtype))
    return spec, PathTable.of(graph_of(spec, links_of(mesh)))


@st.composite
def ends(draw):
    """A tensor on a mesh, the wires of the mesh, and some pairs of layouts."""
    mesh = AbstractMesh(tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8, 16]), min_size=1, max_size=3))))
    shape, dtype = draw(ANY_SHAPE), draw(ANY_DTYPE)
    wires = [draw(st.sampled_from(["loopback", "nvlink", "infiniband", "ethernet"])) for _ in mesh.shape]
    layout = st.tuples(*[st.integers(0, len(shape) + 1)] * mesh.ndim)
    return mesh, wires, shape, dtype, draw(st.lists(st.tuples(layout, layout), min_size=1, max_size=8))


@pytest.mark.sample
@given(ends())
def test_costs_are_those_of_the_searches(case):
    mesh, wires, shape, dtype, pairs = case
    try:
        use_links(mesh, links_of_wires(mesh, wires))
        spec, table = table_of(mesh, shape, dtype)
        layouts = list(product(range(len(table.codes)), repeat=mesh.ndim))
        for pair in pairs:
            src, dst = (spec.with_placements([decode(table.codes[i]) for i in of]) for of in pair)
            cost = table.seconds[layouts.index(pair[0]), layouts.index(pair[1])]
            found = path_cost(src, dst)
            assert cost == found or math.isclose(cost, found, rel_tol=1e-12)
    finally:
        use_links(mesh, None)


def test_codes_are_of_whole_tensors_shards_and_sums():
    _, table = table_of(AbstractMesh((2, 2)), (8, 8))
    assert [table.code(p) for p in (REPLICATE, shard(0), shard(1), partial("sum"))] == [0, 1, 2, 3]
    assert [table.code(p) for p in (partial("max"), strided_shard(0, 2))] == [None, None]


def test_a_table_that_were_too_large_and_one_of_a_mesh_dim_of_one_rank_are_not_made():
    assert table_of(AbstractMesh((2,) * 6), (8, 8))[1] is None
    assert table_of(AbstractMesh((2, 1)), (8, 8))[1] is None
