"""Ranks that are not on a mesh, and operands on several meshes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import MeshMismatchError, OffMeshError, RankDisagreementError
from shardwise.testing import mesh

VALUES = torch.linspace(-1, 2, 8).view(4, 2)
WAYS = {
    "distribute_tensor": lambda m: sw.distribute_tensor(VALUES, m, [Shard(0)]),
    "own values": lambda m: sw.distribute_tensor(VALUES, m, [Replicate()], src_data_rank=None),
    "distribute_module": lambda m: sw.distribute_module(nn.Linear(2, 2), m),
    "from_local": lambda m: sw.MeshTensor.from_local(VALUES, m, [Shard(0)]),
    "from_local, whole": lambda m: sw.MeshTensor.from_local(VALUES, m, [Replicate()], run_check=True),
    "zeros": lambda m: sw.zeros(4, 2, device_mesh=m, placements=[Shard(0)]),
    "rand": lambda m: sw.rand(4, 2, device_mesh=m),
}


def make_on_some_ranks(ranks):
    m = DeviceMesh("cpu", ranks)
    for way in WAYS.values():
        if dist.get_rank() in ranks:
            way(m)
        else:
            with pytest.raises(OffMeshError, match=f"rank {dist.get_rank()} is not on that mesh"):
                way(m)


@pytest.mark.parametrize("ranks", [[1], [0, 2]])
def test_a_rank_that_is_not_on_the_mesh_is_told_so(pool, ranks):
    pool.run(make_on_some_ranks, ranks)


# -- several meshes ----------------------------------------------------------------------------------------------------


def grid():
    return mesh((2, 2), ("dp", "tp"))


def parameters_on_slices():
    """Parameters on slices of a mesh, on the mesh, and on another mesh of the same ranks; the same on one device."""
    meshes = [grid()["dp"], grid()["tp"], grid(), mesh((4,))]
    tensors = [VALUES + i for i in range(len(meshes))]
    layouts = [[Shard(0)], [Shard(1)], [Shard(0), Shard(1)], [Replicate()]]
    plain = [nn.Parameter(t.clone()) for t in tensors]
    ours = [nn.Parameter(sw.distribute_tensor(t, m, p)) for t, m, p in zip(tensors, meshes, layouts, strict=True)]
    return plain, ours


def same(plain, ours):
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(other.full_tensor(), one)


def clip():
    plain, ours = parameters_on_slices()
    for foreach in (True, False, None):
        norms = []
        for parameters in (plain, ours):
            for p in parameters:
                p.grad = p.detach() * 3
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.7, foreach=foreach))
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        same([p.grad for p in plain], [p.grad for p in ours])


def test_gradients_on_several_meshes_are_clipped_together(pool):
    pool.run(clip)


def step(option):
    results = []
    for parameters in parameters_on_slices():
        optimizer = torch.optim.Adam(parameters, lr=0.1, **{option: True})
        for _ in range(2):
            for p in parameters:
                p.grad = p.detach() * 2
            optimizer.step(lambda: torch.zeros(()))  # a closure has the step run op by op
        results.append([p.detach() for p in parameters])
    same(*results)


def test_foreach_and_fused_steps_over_several_meshes(pool):
    pool.run(step, "foreach")
    pool.run(step, "fused")


def unlike_numbers():
    rank = dist.get_rank()
    ours = sw.distribute_tensor(VALUES, mesh((4,)), [Shard(0)])
    number = sw.distribute_tensor(torch.tensor(float(rank // 2)), grid()["tp"])
    with pytest.raises(RankDisagreementError, match="use a number of"):
        ours * number
    alike = sw.distribute_tensor(torch.tensor(2.0), grid()["tp"])
    assert torch.equal((ours * alike).full_tensor(), VALUES * 2)
    with pytest.raises(MeshMismatchError):
        ours + sw.distribute_tensor(VALUES, grid(), [Shard(0), Replicate()])


def test_a_number_of_a_slice_must_be_the_same_on_the_whole_mesh(pool):
    pool.run(unlike_numbers)


def cached_indices():
    """As in a module whose cache for the process was filled on another mesh."""
    index, mask = torch.tensor([3, 0, 3, 1]), torch.tensor([True, False, True, True])
    table, line = torch.arange(24.0).view(4, 6).requires_grad_(), mesh((4,))
    everywhere = [Replicate(), Replicate()]
    here, hidden = (sw.distribute_tensor(t, grid(), everywhere) for t in (index, mask))
    for layout in ([Shard(0)], [Shard(1)], [Replicate()]):
        ours = sw.distribute_tensor(table.detach(), line, layout).requires_grad_()
        for x in (table, ours):
            at, out = (index, mask) if x is table else (here, hidden)
            rows = functional.embedding(at, x) + x[at] + torch.where(out[:, None], x, 1.0) + at[:, None]
            x.grad = None
            rows.square().sum().backward()
        torch.testing.assert_close(ours.grad.full_tensor(), table.grad)
        assert rows.device_mesh == line
    with pytest.raises(MeshMismatchError):  # the other ranks of the line do not have it
        ours[sw.distribute_tensor(index, grid()["tp"], [Replicate()])]
    with pytest.raises(MeshMismatchError):
        ours[sw.distribute_tensor(index, grid(), [Shard(0), Replicate()])]


def cached_tables():
    """A table of numbers that needs no gradient, from a cache of another mesh; forward and backward."""
    table, line = torch.arange(24.0, dtype=torch.float64).view(4, 6), mesh((4,))
    weight = table.sin()
    hidden = sw.distribute_tensor(table, grid(), [Replicate(), Replicate()])
    for layout in ([Shard(0)], [Shard(1)], [Replicate()]):
        ours = sw.distribute_tensor(weight, line, layout).requires_grad_()
        plain = weight.clone().requires_grad_()
        for x, t in ((plain, table), (ours, hidden)):
            out = t * x + torch.cat([t, x])[2:6] + x @ t.T @ t - x.lerp(t, 0.5)
            out.square().sum().backward()
        assert out.device_mesh == line
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)
    before = ours * hidden
    late = hidden.clone().requires_grad_()
    with pytest.raises(MeshMismatchError, match="needs a gradient"):  # the plan of the call above does not let it pass
        ours * late
    with torch.no_grad():
        torch.testing.assert_close((ours * late).full_tensor(), before.full_tensor())
    with pytest.raises(MeshMismatchError):  # no plan is there
        ours - late
    with pytest.raises(MeshMismatchError):
        ours * sw.distribute_tensor(table, grid(), [Shard(0), Replicate()])
    with pytest.raises(MeshMismatchError):  # the other ranks of the line do not have it
        ours * sw.distribute_tensor(table, grid()["tp"], [Replicate()])
    with pytest.raises(MeshMismatchError):  # what is written lies where it lies
        hidden.add_(ours)


def test_a_replicated_table_may_come_from_a_mesh_with_the_same_ranks(pool):
    pool.run(cached_tables)


def test_replicated_integers_may_come_from_a_mesh_with_the_same_ranks(pool):
    pool.run(cached_indices)
