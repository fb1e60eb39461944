"""Redistribution inside a compiled graph: the same numbers as in eager mode, for every kind of step."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.comm.mesh_comm import MeshComm
from shardwise.errors import TracingError
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.shards import scatter_local
from shardwise.testing import mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STEPS = [([S0], [R]), ([S1], [R]), ([S0], [S1]), ([S1], [S0]), ([R], [S1])]
SUMS = [([Partial("sum")], [R]), ([Partial("sum")], [S0]), ([Partial("avg")], [S1]), ([Partial("product")], [R])]
EXTREMES = [([Partial("max")], [R]), ([Partial("min")], [S0])]
TWO = [([S0, S0], [R, R]), ([S0, S1], [S1, S0]), ([Partial("sum"), S0], [S0, R]), ([R, Partial("max")], [S1, R])]


def values(shape, dtype):
    result = torch.arange(torch.Size(shape).numel()).view(shape) % 7 - 3
    return result.to(dtype) * (1 + 1j) if dtype.is_complex else result.to(dtype)


def check(ranks, pairs, shape, dtype):
    """Compile all redistributions as one graph, gradients off; each result must equal eager mode's, bit for bit."""
    torch._dynamo.reset()
    m = DeviceMesh("cpu", ranks)
    whole = values(shape, dtype)
    specs = [TensorSpec(m, source, TensorMeta.of(whole)) for source, _ in pairs]
    sources = [MeshTensor(scatter_local(whole, spec), spec) for spec in specs]

    def redistributed(tensors):
        return [t.redistribute(placements=target) for t, (_, target) in zip(tensors, pairs, strict=True)]

    issued = []
    with events.observe(issued.append):
        result = torch.compile(redistributed, backend="aot_eager", fullgraph=True)(sources)
    assert issued == [], "a collective ran outside the graph"
    for one, other, pair in zip(result, redistributed(sources), pairs, strict=True):
        assert one.spec is other.spec, pair
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=0, atol=0, msg=lambda m, p=pair: f"{p}: {m}")


SAMPLE = [pytest.mark.slow, pytest.mark.sample]


# Every day a rank without elements is among the ranks in an order of their own.
SHAPES = [(7, 5), *(pytest.param(shape, marks=SAMPLE) for shape in ((1, 3), (8, 4), (3, 2)))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_over_one_mesh_dim(ranks, shape):
    ranks.run(check, list(range(ranks.world_size)), STEPS + SUMS + EXTREMES, shape, torch.float64, timeout=120)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, pytest.param(torch.int64, marks=SAMPLE), torch.bfloat16, pytest.param(torch.complex64, marks=SAMPLE)],
    ids=str,
)
def test_steps_in_dtypes_that_backends_do_not_all_carry(ranks, dtype):
    pairs = STEPS + (SUMS[:2] if dtype.is_complex or dtype == torch.bool else SUMS[:3])
    ranks.run(check, list(range(ranks.world_size)), pairs, (7, 5), dtype, timeout=120)


def test_steps_over_two_mesh_dims(pool):
    pool.run(check, [[0, 1], [2, 3]], TWO, (7, 6), torch.float64, timeout=120)


@pytest.mark.parametrize("shape", [pytest.param((8, 5), marks=SAMPLE), (3, 5)], ids=str)
def test_ranks_in_an_order_of_their_own(pool, shape):
    pool.run(check, [2, 0, 3, 1], STEPS + SUMS + EXTREMES, shape, torch.float64, timeout=120)


@pytest.mark.slow
@pytest.mark.sample
def test_ranks_in_an_order_of_their_own_over_two_mesh_dims(pool):
    pool.run(check, [[3, 1], [0, 2]], TWO, (7, 6), torch.float64, timeout=120)


def winners():
    torch._dynamo.reset()
    whole = torch.tensor([3.0, 1.0, 7.0, 2.0, 7.0, 5.0, 0.0])
    m = DeviceMesh("cpu", [0, 1, 2, 3])
    spec = TensorSpec(m, [S0], TensorMeta.of(whole))
    compiled = torch.compile(lambda t: t.argmax(0), backend="aot_eager", fullgraph=True)
    return compiled(MeshTensor(scatter_local(whole, spec), spec)).full_tensor().item()


def test_the_position_of_the_largest_over_a_sharded_dim(pool):
    assert pool.run(winners) == [2] * 4


def refuses_shapes():
    comm = MeshComm(mesh((4,)))

    def gathered(t):
        return torch.cat(comm.all_gather(t, 0))

    with FakeTensorMode() as mode, pytest.raises(TracingError, match="cannot wait"):
        gathered(mode.from_tensor(torch.ones(3)))
    return True


def test_what_needs_other_ranks_shapes_is_refused(pool):
    assert pool.run(refuses_shapes) == [True] * 4
