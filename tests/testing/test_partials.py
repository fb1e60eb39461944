"""Random decompositions: what they are put together to, and that they are not tame."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS, reduce_pieces
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.shards import assemble
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
        found = pieces(value, kind, count, generator(seed))
        assert len(found) == count
        assert all(piece.dtype == dtype and piece.shape == value.shape for piece in found)
        assert_alike(reduce_pieces(found, kind), value)


# All but those whose only factors are ones.
@pytest.mark.parametrize(("kind", "dtype"), [pair for pair in PAIRS if pair != ("product", torch.uint8)])
def test_pieces_are_not_the_value_itself(kind, dtype):
    found = pieces(made((4, 5), dtype), kind, 3, generator())
    assert len({str(piece.tolist()) for piece in found}) == 3


def test_pieces_of_a_sum_cancel_and_those_of_a_maximum_go_below_zero():
    value = torch.full((50,), 2.0)
    summed = torch.stack(pieces(value, "sum", 4, generator()))
    assert summed.abs().max() > 10
    assert (summed.amin(0) < 0).any()
    assert torch.stack(pieces(value, "max", 4, generator())).min() < 0
    assert torch.stack(pieces(value, "min", 4, generator())).max() > 4


def test_integers_stay_in_their_range():
    for kind, value in (("max", 0), ("min", 255)):
        found = pieces(torch.full((9,), value, dtype=torch.uint8), kind, 3, generator())
        assert all(torch.equal(piece, found[0]) for piece in found)


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
    found = place(full, spec, generator(seed))
    assert list(found) == spec.mesh.coordinates()
    assert all(tuple(local.shape) == spec.local_shape(at) for at, local in found.items())
    assert_alike(assemble(found, spec), full)


@given(specs())
def test_local_tensors_own_their_memory(spec):
    full = made(spec.shape, torch.float64)
    kept = full.clone()
    for local in place(full, spec, generator()).values():
        local.fill_(7)
    assert torch.equal(full, kept)
