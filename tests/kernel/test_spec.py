"""Specs: the arithmetic of shards, and equal specs being one object."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from shardwise.errors import PlacementCountError, PlacementError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.symbols import chunk
from shardwise.kernel.tensor_meta import TensorMeta, dtype_name

MESH = AbstractMesh((2, 3))


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = AbstractMesh(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
    kinds = [Replicate(), Partial("sum"), Partial("max"), *(Shard(d) for d in range(len(shape)))]
    placements = draw(st.tuples(*(st.sampled_from(kinds) for _ in mesh.shape)))
    return TensorSpec(mesh, placements, TensorMeta.contiguous(shape, torch.float32))


def by_chunk(whole, spec, coordinate):
    """The shard as torch.chunk cuts it, mesh dim by mesh dim."""
    for mesh_dim, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            pieces = whole.chunk(spec.mesh_shape[mesh_dim], placement.dim)
            empty = whole.narrow(placement.dim, whole.shape[placement.dim], 0)
            at = coordinate[mesh_dim]
            whole = pieces[at] if at < len(pieces) else empty
    return whole


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunk_cuts_as_torch_does(size, parts):
    pieces = torch.arange(size).chunk(parts)
    sizes = [len(p) for p in pieces] + [0] * (parts - len(pieces))
    assert [chunk(size, parts, i)[0] for i in range(parts)] == sizes
    assert [chunk(size, parts, i)[1] for i in range(parts)] == [sum(sizes[:i]) for i in range(parts)]


@given(specs())
def test_local_shapes_and_offsets_are_those_of_torch_chunk(spec):
    whole = torch.arange(spec.tensor_meta.numel).reshape(spec.shape)
    for at in spec.mesh.coordinates():
        expected = by_chunk(whole, spec, at)
        shape, offset = spec.local_shape_and_offset(at)
        assert shape == tuple(expected.shape)
        assert spec.local_shape(at) == shape
        part = whole
        for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
            part = part.narrow(dim, start, size)
        assert torch.equal(expected, part)


@given(specs())
def test_the_first_rank_has_the_largest_shard(spec):
    sizes = [torch.Size(spec.local_shape(at)).numel() for at in spec.mesh.coordinates()]
    assert spec.max_local_numel == max(sizes) == sizes[0]


@given(specs())
def test_the_dim_map_is_the_placements_read_by_tensor_dim(spec):
    for dim, mesh_dims in enumerate(spec.dim_map):
        assert list(mesh_dims) == [m for m, p in enumerate(spec.placements) if p == Shard(dim)]
        assert spec.shards_per_dim[dim] == torch.Size([spec.mesh_shape[m] for m in mesh_dims]).numel()
    assert spec.num_shards == torch.Size(spec.shards_per_dim).numel()
    assert sorted(spec.reductions) == [m for m, p in enumerate(spec.placements) if isinstance(p, Partial)]
    assert spec.is_replicated == all(isinstance(p, Replicate) for p in spec.placements)


@given(specs())
def test_equal_specs_are_one_object(spec):
    assert TensorSpec(AbstractMesh(spec.mesh_shape), list(spec.placements), TensorMeta(*_parts(spec))) is spec
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert copy.deepcopy(spec) is spec
    assert spec.with_placements(spec.placements) is spec
    assert spec.with_meta(spec.tensor_meta) is spec


def _parts(spec):
    return tuple(spec.shape), spec.stride, spec.dtype


def test_a_negative_shard_dim_is_the_same_spec():
    meta = TensorMeta.contiguous((4, 6), torch.float32)
    negative = TensorSpec(MESH, [Shard(-1), Replicate()], meta)
    assert negative is TensorSpec(MESH, [Shard(1), Replicate()], meta)
    assert negative.placements == (Shard(1), Replicate())


def test_a_copy_is_another_spec():
    meta = TensorMeta.contiguous((4,), torch.float32)
    plain = TensorSpec(MESH, [Shard(0), Replicate()], meta)
    marked = TensorSpec(MESH, [Shard(0), Replicate()], meta, True)
    assert marked is not plain
    assert marked.is_copy
    assert marked.with_placements([Replicate(), Replicate()]).is_copy is False


@pytest.mark.parametrize(
    ("placements", "error"),
    [
        ([Shard(0)], PlacementCountError),
        ([Shard(2), Replicate()], PlacementError),
        ([Shard(-3), Replicate()], PlacementError),
        ([Partial("median"), Replicate()], PlacementError),
        (["S(0)", Replicate()], PlacementError),
    ],
)
def test_bad_placements_are_refused(placements, error):
    with pytest.raises(error):
        TensorSpec(MESH, placements, TensorMeta.contiguous((4, 6), torch.float32))


def test_an_abstract_mesh_has_no_own_coordinate():
    spec = TensorSpec(MESH, [Shard(0), Replicate()], TensorMeta.contiguous((4,), torch.float32))
    with pytest.raises(TypeError, match="no own coordinate"):
        spec.local_shape()


def test_what_specs_print():
    spec = TensorSpec(MESH, [Shard(1), Partial("avg")], TensorMeta.contiguous((4, 6), torch.bfloat16))
    assert str(spec) == "bf16[4,6] [S(1), P(avg)]"
    assert repr(spec) == "TensorSpec(bf16[4,6], [S(1), P(avg)], mesh=2x3)"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.int64, "i64"),
        (torch.uint8, "u8"),
        (torch.bool, "bool"),
        (torch.complex64, "c64"),
    ],
)
def test_short_dtype_names(dtype, name):
    assert dtype_name(dtype) == name


@given(st.lists(st.integers(0, 5), max_size=4))
def test_a_contiguous_meta_has_the_strides_of_a_fresh_tensor(shape):
    assert TensorMeta.contiguous(shape, torch.int32) == TensorMeta.of(torch.empty(shape, dtype=torch.int32))


def test_a_meta_tensor_keeps_shape_stride_and_dtype():
    meta = TensorMeta.of(torch.empty(4, 6, dtype=torch.float16).t())
    assert TensorMeta.of(meta.to_meta_tensor()) == meta
    assert (meta.ndim, meta.numel, meta.nbytes, str(meta)) == (2, 24, 48, "f16[6,4]")
    assert not meta.is_symbolic


def test_an_abstract_mesh_lists_its_ranks_in_row_major_order():
    assert MESH.coordinates() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (MESH.ndim, MESH.size(), MESH.size(1)) == (2, 6, 3)
