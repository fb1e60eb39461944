"""Symbols for sizes: what is computed of them is what is computed of the numbers that they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from shardwise import Replicate, Shard
from shardwise.kernel import symbols as sizes
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.spec import SymbolicSpec, TensorSpec, hinted, in_numbers
from shardwise.kernel.symbols import chunk
from shardwise.kernel.tensor_meta import TensorMeta

LENGTHS = st.integers(2, 40)


def symbols(*numbers):
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(numbers))
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(numbers), symbolic_context=context).shape


@given(LENGTHS)
def test_pieces_of_a_symbol_are_those_of_its_number(length):
    (n,) = symbols(length)
    for parts in range(1, 6):
        for i in range(parts):
            assert tuple(map(sizes.hint, sizes.symbolic_chunk(n, parts, i))) == chunk(length, parts, i)
        expected = {chunk(length, parts, i)[0] for i in range(parts)}
        assert {sizes.hint(size) for size in sizes.lengths(n, parts)} == expected


@given(LENGTHS, LENGTHS)
def test_a_common_factor_of_symbols_divides_both(one, other):
    n, m = symbols(one, other)
    assert sizes.common_factor(one, other) == math.gcd(one, other)
    for a, b in ((n, m), (n, n), (6 * n, n), (n, 6 * n), (n, other), (n * m, m)):
        found = sizes.hint(sizes.common_factor(a, b))
        assert sizes.hint(a) % found == 0
        assert sizes.hint(b) % found == 0
    assert sizes.hint(sizes.common_factor(6 * n, n)) == one


@pytest.mark.slow
@pytest.mark.sample
@given(LENGTHS, st.sampled_from([(4,), (2, 2), (3, 2)]))
def test_a_spec_of_symbols_places_as_that_of_its_numbers(length, shape):
    mesh = AbstractMesh(shape)
    n, m = symbols(length, 50)
    placements = [Shard(0)] * len(shape)
    spec = TensorSpec(mesh, placements, TensorMeta((n, m), (m, 1), torch.float32))
    assert type(spec) is SymbolicSpec
    assert hinted(spec) is TensorSpec(mesh, placements, TensorMeta((length, 50), (50, 1), torch.float32))
    for where in mesh.coordinates():
        shown = [tuple(map(sizes.hint, part)) for part in spec.local_shape_and_offset(where)]
        assert tuple(shown) == hinted(spec).local_shape_and_offset(where)
    assert in_numbers(spec) is hinted(spec)


def test_specs_of_symbols_have_no_hash_and_specs_of_numbers_are_one():
    mesh = AbstractMesh((4,))
    (n,) = symbols(8)
    spec = TensorSpec(mesh, [Shard(0)], TensorMeta((n,), (1,), torch.float32))
    with pytest.raises(TypeError):
        hash(spec)
    assert spec.with_placements([Shard(0)]) is spec
    assert (
        spec.with_placements([Replicate()]).layout is TensorSpec(mesh, [Replicate()], hinted(spec).tensor_meta).layout
    )
    assert n == 8  # the symbol can be no other from here on
    assert type(TensorSpec(mesh, [Shard(0)], TensorMeta((n,), (1,), torch.float32))) is TensorSpec
