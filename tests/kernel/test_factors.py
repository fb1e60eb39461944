"""Strided shards: their factors, and their parts beside torch's own splitting."""

import itertools
import pickle
import random

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import LayoutError, PlacementError
from shardwise.kernel.factors import factors_of, flat_placements, refined
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.placements import Replicate, Shard, parse_placement, show_all, strided_shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.shards import assemble, scatter_local

R = Replicate()


def _spec(shape, placements, mesh_shape):
    return TensorSpec(AbstractMesh(mesh_shape), placements, TensorMeta.contiguous(shape, torch.float32))


def _by_torch(full, placements, mesh_shape, at):
    """A rank's part as torch's placements split it, one mesh dim after the other."""
    for m, p in enumerate(placements):
        if not isinstance(p, Replicate):
            full = p._split_tensor(full, mesh_shape[m], with_padding=False)[0][at[m]]
    return full


def _layouts(seed, count):
    """Layouts with strided shards, even and uneven, on meshes of one to four dims."""
    rng = random.Random(seed)  # noqa: S311  # chance, no secret
    made = 0
    while made < count:
        mesh_shape = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(1, 4)))
        shape = (rng.choice((4, 8, 12, 16, 24, 30, 48)), rng.choice((3, 5, 8, 12)))
        choices = [R, Shard(0), Shard(1), *(_StridedShard(d, split_factor=f) for d in (0, 1) for f in (2, 3, 4, 6))]
        placements = tuple(rng.choice(choices) for _ in mesh_shape)
        try:
            spec = _spec(shape, placements, mesh_shape)
        except PlacementError:
            continue
        if spec.is_strided:
            made += 1
            yield spec


@pytest.mark.parametrize("seed", range(4))
def test_parts_are_those_of_torchs_own_splitting(seed):
    for spec in _layouts(seed, 60):
        full = torch.arange(spec.tensor_meta.numel, dtype=torch.float32).view(spec.shape)
        parts = {}
        for at in coordinates(spec.mesh_shape):
            parts[at] = scatter_local(full, spec, at)
            assert torch.equal(parts[at], _by_torch(full, spec.placements, spec.mesh_shape, at)), (spec, at)
            assert spec.local_shape(at) == tuple(parts[at].shape)
        assert torch.equal(assemble(parts, spec), full)
        assert spec.max_local_numel == max(p.numel() for p in parts.values())


@pytest.mark.parametrize("seed", range(4, 6))
def test_a_layout_comes_back_from_its_factors(seed):
    for spec in _layouts(seed, 60):
        inner = spec.unflattened(spec.factors)
        assert not inner.is_strided
        back = flat_placements(inner.placements, spec.mesh_shape, spec.factors)
        full = torch.arange(spec.tensor_meta.numel, dtype=torch.float32).view(spec.shape)
        again = spec.with_placements(back)
        for at in coordinates(spec.mesh_shape):
            assert torch.equal(scatter_local(full, again, at), scatter_local(full, spec, at)), (spec, again)


@pytest.mark.parametrize(
    ("placements", "mesh_shape", "factors"),
    [
        ([strided_shard(0, 4)], (2,), ((4, 6),)),
        ([strided_shard(0, 4)], (4,), ((4, 6),)),  # 6 over 4 ranks: the last factor may be uneven
        ([strided_shard(0, 24)], (2,), ((24, 1),)),
        ([Shard(0), strided_shard(0, 2)], (2, 3), ((4, 6),)),
        ([strided_shard(0, 4), Shard(0)], (3, 2), ((4, 6),)),
        ([strided_shard(0, 4), strided_shard(0, 2)], (3, 2), ((2, 2, 6),)),
        ([strided_shard(0, 4), R], (1, 2), ((24,),)),
    ],
)
def test_factors(placements, mesh_shape, factors):
    assert factors_of((24,), placements, mesh_shape) == factors


@pytest.mark.parametrize(
    ("placements", "mesh_shape"),
    [
        ([strided_shard(0, 5)], (2,)),  # 24 elements are no five pieces
        ([strided_shard(0, 48)], (2,)),
        ([strided_shard(0, 4), Shard(0)], (2, 3)),  # three ranks share four pieces
        ([Shard(0), strided_shard(0, 3)], (5, 2)),  # ranks with 5 and with 4 elements
    ],
)
def test_pieces_of_several_sizes_are_refused(placements, mesh_shape):
    with pytest.raises(PlacementError, match="would not have one size"):
        _spec((24,), placements, mesh_shape)


def test_a_strided_shard_says_what_it_cannot_say():
    spec = _spec((24, 3), [strided_shard(0, 4)], (2,))
    (rows, columns), (start, first) = spec.local_shape_and_offset((1,))
    assert (rows, columns, first) == (12, 3, 0)
    with pytest.raises(LayoutError, match="several blocks"):
        start + 1
    assert spec.dim_map == ((0,), ())
    assert spec.shards_per_dim == (2, 1)


def test_text_and_pickles():
    placements = (_StridedShard(1, split_factor=3), Shard(0))
    assert show_all(placements) == "[_S(1, 3), S(0)]"
    assert parse_placement("_S(1, 3)") == placements[0]
    assert strided_shard(1, 1) == Shard(1)
    assert pickle.loads(pickle.dumps(placements)) == placements
    for text in ("_S(1)", "_S(1, 0)", "_S(a, 2)"):
        with pytest.raises(PlacementError):
            parse_placement(text)
    with pytest.raises(PlacementError, match="no dim 2"):
        _spec((4, 4), [_StridedShard(2, split_factor=2)], (2,))
    assert _spec((4, 4), [_StridedShard(-1, split_factor=2)], (2,)).placements == (strided_shard(1, 2),)


def test_refinements():
    for a, b in itertools.product(((24,), (4, 6), (2, 12), (8, 3), (2, 2, 6)), repeat=2):
        (both,) = refined((a,), (b,))
        assert torch.Size(both).numel() == 24
        assert {1} <= {torch.Size(both[:k]).numel() for k in range(len(both))}
    assert refined(((4, 6),), ((3, 8),)) is None
