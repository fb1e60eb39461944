"""The shapes of meshes that a number of ranks can have."""

import math

import pytest

from shardwise.steps.factoring import mesh_shapes


@pytest.mark.parametrize(("ranks", "most", "count"), [(64, 3, 16), (64, 1, 1), (7, 3, 1), (12, 2, 5), (2, 3, 1)])
def test_every_shape_once(ranks, most, count):
    shapes = mesh_shapes(ranks, most)
    assert len(set(shapes)) == len(shapes) == count
    assert all(math.prod(shape) == ranks and min(shape) > 1 and len(shape) <= most for shape in shapes)
