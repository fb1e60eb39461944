"""Strategies: what they draw is legal, reaches what it should, and shrinks to what is simple."""

import subprocess
import sys
from math import prod

import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st

from shardwise.errors import ShardingError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, check_placements, partial, shard
from shardwise.testing import strategies as sst
from shardwise.testing.schema_samples import accepts

aten = torch.ops.aten


@given(sst.shapes(1, 3, max_size=5), sst.shapes(empty=False))
def test_shapes_are_within_their_limits(shape, full):
    assert 1 <= len(shape) <= 3
    assert all(0 <= n <= 5 for n in shape)
    assert all(1 <= n <= 9 for n in full)


@given(sst.mesh_shapes(2, max_size=6), sst.mesh_shapes(ranks=8))
def test_meshes_have_their_ranks(some, eight):
    assert len(some) <= 2
    assert 1 <= prod(some) <= 6
    assert len(eight) <= 3
    assert prod(eight) == 8


@given(st.data(), sst.shapes(), st.integers(1, 3))
def test_placements_fit_their_tensor(data, shape, ndim):
    draws = data.draw(sst.placements(shape, ndim))
    assert check_placements(draws, ndim, len(shape)) == draws
    integers = data.draw(sst.placements(shape, ndim, dtype=torch.int8, kinds=("avg",)))
    assert partial("avg") not in integers


@given(sst.specs(), sst.specs(AbstractMesh((2, 2)), (5, 7), kinds=()))
def test_specs_fit_their_mesh(spec, given_spec):
    assert len(spec.placements) == spec.mesh.ndim
    assert given_spec.shape == (5, 7)
    assert not given_spec.reductions


@pytest.mark.parametrize("op", [aten.mm.default, aten.add.Tensor, aten.embedding.default], ids=str)
def test_samples_are_calls_that_the_op_takes(op):
    @given(sst.samples(op))
    def check(sample):
        assert accepts(op, *sample, fake=False)

    check()


def test_everything_shrinks_to_what_is_simple():
    assert find(sst.shapes(), lambda _: True) == ()
    assert find(sst.shapes(), lambda shape: len(shape) > 1) == (1, 1)
    assert find(sst.mesh_shapes(), lambda _: True) == (1,)
    assert find(sst.mesh_shapes(ranks=4), lambda shape: len(shape) > 1) == (1, 4)
    assert find(sst.placements((2, 3), 2), lambda _: True) == (REPLICATE, REPLICATE)
    assert find(sst.placements((2, 3), 2), lambda p: p != (REPLICATE, REPLICATE)) == (REPLICATE, shard(0))
    args, kwargs = find(sst.samples(aten.mm.default), lambda _: True)
    assert [tuple(t.shape) for t in args] == [(1, 1), (1, 1)]
    assert kwargs == {}


def test_empty_and_uneven_samples_come():
    assert find(sst.samples(aten.relu.default), lambda s: s[0][0].numel() == 0)
    assert find(sst.samples(aten.relu.default), lambda s: any(n % 4 for n in s[0][0].shape) and s[0][0].ndim == 3)


def test_an_op_that_takes_no_guess_is_refused():
    with pytest.raises(ShardingError, match=r"draw samples of aten.conv_tbc.default.*Write a strategy"):
        find(sst.samples(aten.conv_tbc.default), lambda _: True)


@pytest.mark.slow
@pytest.mark.sample
def test_without_hypothesis_the_extra_is_named():
    code = "import sys; sys.modules['hypothesis'] = None; import shardwise.testing; import shardwise.testing.strategies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "needs hypothesis: pip install 'shardwise[test]'" in done.stderr
