"""The search: what it says before it is done is true, and stopping it changes nothing."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning import layout_graph
from shardwise.planning.cost import links_of
from shardwise.planning.layout_graph import graph_of
from shardwise.planning.path_search import Search


@st.composite
def ways(draw):
    """The graph of one tensor, a layout to leave and one to reach; sizes are small and large, even and not."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    shape = [draw(st.sampled_from([1, 7, 64, 3000])) for _ in range(draw(st.integers(0, 3)))]
    code = st.integers(-len(REDUCE_OPS), len(shape))
    start, goal = (tuple(draw(code) for _ in mesh_shape) for _ in range(2))
    return mesh_shape, shape, start, goal


def fresh(mesh_shape, shape):
    layout_graph._cached_graph.cache_clear()
    meta = TensorMeta.contiguous(shape, torch.float32)
    whole = TensorSpec(AbstractMesh(mesh_shape), [layout_graph.decode(0)] * len(mesh_shape), meta)
    return graph_of(whole, links_of(whole.mesh))


@settings(deadline=None)
@given(ways())
def test_a_search_in_steps_finds_what_a_search_in_one_go_finds(way):
    mesh_shape, shape, start, goal = way
    whole = Search(fresh(mesh_shape, shape), start, goal)
    whole.advance(math.inf)
    stepwise = Search(fresh(mesh_shape, shape), start, goal)
    lower = stepwise.lower
    while not stepwise.done:
        assert lower <= stepwise.lower <= whole.lower
        lower = stepwise.lower
        stepwise.advance(0)
    assert (stepwise.lower, stepwise.steps) == (whole.lower, whole.steps)


@settings(deadline=None)
@given(ways())
def test_a_path_that_was_found_is_not_searched_again(way):
    mesh_shape, shape, start, goal = way
    known = fresh(mesh_shape, shape)
    first = Search(known, start, goal)
    first.advance(math.inf)
    known.keep_paths_only()
    again = Search(known, start, goal)
    assert again.done
    assert (again.lower, again.steps) == (first.lower, first.steps)


def test_the_bound_of_a_search_stops_it_early():
    known = fresh((2, 2, 2), [3000, 3000])
    search = Search(known, (1, 2, 2), (2, 1, 2))
    search.advance(0)
    assert not search.done
    assert 0 < search.lower < math.inf
