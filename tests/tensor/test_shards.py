import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, parse_placement, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS, neutral, reduce_pieces
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.shards import assemble, scatter_local


def spec_of(tensor, mesh_shape, *placements):
    return TensorSpec(AbstractMesh(mesh_shape), [parse_placement(p) for p in placements], TensorMeta.of(tensor))


@st.composite
def layouts(draw):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    each = st.sampled_from([REPLICATE, *map(shard, range(len(shape))), *map(partial, REDUCE_OPS)])
    placements = tuple(draw(each) for _ in mesh_shape)
    return TensorSpec(AbstractMesh(mesh_shape), placements, TensorMeta.contiguous(shape, torch.float64))


@settings(deadline=None)
@given(layouts())
def test_assemble_undoes_scatter(spec):
    full = torch.randn(spec.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = {c: scatter_local(full, spec, c) for c in spec.mesh.coordinates()}
    assert {c: tuple(p.shape) for c, p in parts.items()} == {c: spec.local_shape(c) for c in parts}
    torch.testing.assert_close(assemble(parts, spec), full)


def test_a_dim_over_two_mesh_dims_is_split_from_left_to_right():
    full = torch.arange(5)
    spec = spec_of(full, (2, 2), "S(0)", "S(0)")
    parts = {c: scatter_local(full, spec, c).tolist() for c in spec.mesh.coordinates()}
    assert parts == {(0, 0): [0, 1], (0, 1): [2], (1, 0): [3], (1, 1): [4]}


def test_reductions_are_reduced_from_the_last_mesh_dim_to_the_first():
    full = torch.zeros(1)
    parts = {c: torch.tensor([float(v)]) for c, v in zip(itertools.product((0, 1), (0, 1)), (1, 5, 7, 2), strict=True)}
    assert assemble(parts, spec_of(full, (2, 2), "P(sum)", "P(max)")).item() == max(1, 5) + max(7, 2)
    assert assemble(parts, spec_of(full, (2, 2), "P(max)", "P(sum)")).item() == max(1 + 5, 7 + 2)


def test_a_scattered_shard_owns_its_memory_and_keeps_the_order_of_strides():
    full = torch.arange(12.0).reshape(3, 4).t()
    part = scatter_local(full, spec_of(full, (2,), "S(0)"), (1,))
    assert part.stride() == (1, 2)
    part.zero_()
    assert full.sum() == 66


def test_scatter_wants_the_global_shape():
    with pytest.raises(LayoutError, match=r"shape \(3,\).*f32\[4\]"):
        scatter_local(torch.zeros(3), spec_of(torch.zeros(4), (2,), "S(0)"), (0,))


def test_assemble_names_a_missing_rank():
    spec = spec_of(torch.zeros(4), (2,), "S(0)")
    with pytest.raises(LayoutError, match=r"no local tensor for the ranks at \[\(1,\)\]"):
        assemble({(0,): torch.zeros(2)}, spec)


def test_assemble_refuses_copies_that_differ_in_shape():
    spec = spec_of(torch.zeros(4), (2,), "R")
    with pytest.raises(LayoutError, match=r"the rank at \(1,\).*\(3,\), not \(4,\)") as caught:
        assemble({(0,): torch.zeros(4), (1,): torch.zeros(3)}, spec)
    assert caught.value.coordinate == (1,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", ["sum", "max", "min", "product"])
def test_the_neutral_value_changes_nothing(kind, dtype):
    value = torch.tensor([0, 1, 3]).to(dtype)
    filled = torch.full_like(value, neutral(kind, dtype))
    assert reduce_pieces([value, filled], kind).tolist() == value.tolist()


@pytest.mark.parametrize(("kind", "dtype"), [("avg", torch.bool), ("max", torch.complex64), ("min", torch.complex64)])
def test_a_kind_that_the_dtype_lacks_is_refused(kind, dtype):
    with pytest.raises(LayoutError, match=f"has no {kind}"):
        reduce_pieces([torch.ones(2, dtype=dtype)] * 2, kind)


def test_nan_passes_through_max_and_min():
    pieces = [torch.tensor([1.0, 2.0]), torch.tensor([float("nan"), 3.0])]
    assert reduce_pieces(pieces, "max").isnan().tolist() == [True, False]
    assert reduce_pieces(pieces, "min").isnan().tolist() == [True, False]


def test_an_integer_average_is_cut_towards_zero():
    assert reduce_pieces([torch.tensor([-3, 3]), torch.tensor([0, 0])], "avg").tolist() == [-1, 1]


def test_a_row_major_tensor_has_row_major_parts():
    full = torch.arange(36.0).reshape(2, 6, 3)
    spec = TensorSpec(AbstractMesh((2, 6)), [shard(0), shard(1)], TensorMeta.of(full))
    assert scatter_local(full, spec, (1, 2)).stride() == (3, 3, 1)
