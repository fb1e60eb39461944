"""Random decompositions: what they are put together to, and that they are not tame."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS, average, reduce_pieces, scaled_down
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.shards import assemble
from shardwise.testing.exact_parts import few_digits
from shardwise.testing.partials import can_be_partial, pieces, place
from shardwise.testing.values import made

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.complex64: 2e-5}
PAIRS = [(kind, dtype) for kind in REDUCE_OPS for dtype in DTYPES if can_be_partial(kind, dtype)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_alike(found, expected):
    tolerance = TOLERANCE.get(expected.dtype, 1e-9)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("kind", "dtype"), PAIRS)
def test_pieces_reduce_to_the_value(kind, dtype, count):
    value = made((4, 5), dtype)
    for seed in range(5):
        parts = pieces(value, kind, count, generator(seed))
        assert len(parts) == count
        assert all(piece.dtype == dtype and piece.shape == value.shape for piece in parts)
        assert_alike(reduce_pieces(parts, kind), value)


# All but those whose only factors are ones.
@pytest.mark.parametrize(("kind", "dtype"), [pair for pair in PAIRS if pair != ("product", torch.uint8)])
def test_pieces_are_not_the_value_itself(kind, dtype):
    parts = pieces(made((4, 5), dtype), kind, 3, generator())
    assert len({str(piece.tolist()) for piece in parts}) == 3


def test_pieces_of_a_sum_cancel_and_those_of_a_maximum_go_below_zero():
    value = torch.full((50,), 2.0)
    summed = torch.stack(pieces(value, "sum", 4, generator()))
    assert summed.abs().max() > 10
    assert (summed.amin(0) < 0).any()
    assert torch.stack(pieces(value, "max", 4, generator())).min() < 0
    assert torch.stack(pieces(value, "min", 4, generator())).max() > 4


def test_integers_stay_in_their_range():
    for kind, value in (("max", 0), ("min", 255)):
        parts = pieces(torch.full((9,), value, dtype=torch.uint8), kind, 3, generator())
        assert all(torch.equal(piece, parts[0]) for piece in parts)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_nan_is_handed_on(kind):
    value = torch.tensor([float("nan"), 1.0, float("inf"), float("-inf")])
    assert_alike(reduce_pieces(pieces(value, kind, 3, generator()), kind), value)


@pytest.mark.parametrize(
    ("kind", "dtype", "possible"),
    [
        ("avg", torch.bool, False),
        ("avg", torch.uint8, False),
        ("avg", torch.int64, True),
        ("max", torch.bool, True),
        ("max", torch.complex64, False),
        ("sum", torch.complex64, True),
    ],
)
def test_what_can_be_partial(kind, dtype, possible):
    assert can_be_partial(kind, dtype) is possible


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    mesh = AbstractMesh(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))))
    kind = partial(draw(st.sampled_from(REDUCE_OPS)))
    placements = st.sampled_from([REPLICATE, kind, *(shard(d) for d in range(len(shape)))])
    return TensorSpec(mesh, tuple(draw(placements) for _ in mesh.shape), TensorMeta.contiguous(shape, torch.float64))


@given(specs(), st.integers(0, 99))
def test_what_is_placed_assembles_to_the_whole(spec, seed):
    full = made(spec.shape, torch.float64, seed)
    parts = place(full, spec, generator(seed))
    assert list(parts) == spec.mesh.coordinates()
    assert all(tuple(local.shape) == spec.local_shape(at) for at, local in parts.items())
    assert_alike(assemble(parts, spec), full)


@given(specs())
def test_local_tensors_own_their_memory(spec):
    full = made(spec.shape, torch.float64)
    kept = full.clone()
    for local in place(full, spec, generator()).values():
        local.fill_(7)
    assert torch.equal(full, kept)


# -- exact parts of values with few digits ---------------------------------------------------------------------------

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
SPECIAL = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 2.0**16, -(2.0**-16), 200.0, 3e-3])


def in_every_order(local, spec):
    """The whole tensor, reduced over mesh dims and ranks in several orders, in the dtype itself."""
    stacked = torch.stack(list(local.values())).reshape(*spec.mesh_shape, *spec.shape)
    for order in itertools.permutations(range(spec.mesh.ndim)):
        for flip in (False, True):
            reduced = stacked
            for done, m in enumerate(order):
                dim = m - sum(other < m for other in order[:done])
                averaged = spec.placements[m].reduce_op == "avg"
                parts = (scaled_down(reduced, reduced.shape[dim]) if averaged else reduced).unbind(dim)
                total = functools.reduce(torch.add, parts[::-1] if flip else parts)
                reduced = average(total, len(parts)) if averaged else total
            yield reduced


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3,), (2, 4), (3, 2), (8,), (2, 2, 2)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_parts_of_a_value_with_few_digits_add_up_to_it_exactly(dtype, mesh_shape):
    value = made((6, 8), dtype)
    if dtype != torch.float16 and not dtype.is_complex:
        value[0] = SPECIAL.to(dtype)
    value = few_digits(value)
    for seed, kinds in enumerate(itertools.product(["sum", "avg"], repeat=len(mesh_shape))):
        placements = tuple(partial(kind) for kind in kinds)
        spec = TensorSpec(AbstractMesh(mesh_shape), placements, TensorMeta.of(value))
        local = place(value, spec, generator(seed), exact=True)
        assert len({str(part.tolist()) for part in local.values()}) == spec.mesh.size()
        for found in in_every_order(local, spec):
            assert_same_bits(found, value)


def assert_same_bits(found, value):
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in (found, value)]
    torch.testing.assert_close(*parts, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*(part.signbit() for part in parts))


def test_exact_parts_cancel():
    value = few_digits(torch.full((50,), 1.9))
    spec = TensorSpec(AbstractMesh((4,)), (partial("sum"),), TensorMeta.of(value))
    local = torch.stack(list(place(value, spec, generator(), exact=True).values()))
    assert local.abs().max() > 2
    assert (local.amin(0) < 0).any()


def test_few_digits_keep_strides_and_are_kept():
    base = made((4, 6))
    for value in (base.t(), base[:, ::2], base[:1].expand(4, 6), torch.ones(0, 3)):
        few = few_digits(value)
        assert (few.shape, few.stride()) == (value.shape, value.stride())
        torch.testing.assert_close(few, value, rtol=1e-3, atol=0)
        assert torch.equal(few_digits(few), few)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parts_of_a_product_of_the_largest_and_smallest_numbers(dtype):
    limits = torch.finfo(dtype)
    value = torch.tensor([limits.max, limits.min, limits.tiny, -limits.tiny, 1.5, 0.0, float("inf")], dtype=dtype)
    for seed in range(20):
        parts = pieces(value, "product", 4, generator(seed))
        for order in itertools.permutations(parts):
            assert_same_bits(functools.reduce(torch.mul, order).abs(), value.abs())
