"""What the ranks of a mesh agree on once: whether they have is the same on each rank, whatever else a rank does."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.comm import layout_agreement
from shardwise.comm.agreement import agree_on_generator
from shardwise.comm.groups import all_reduce, group_of
from shardwise.testing import WorkerPool, mesh


def agreements_on_equal_meshes():
    """The first rank keeps each mesh that it is done with, and the others delete theirs."""
    kept = []
    for _ in range(2):
        again = init_device_mesh("cpu", (4,), mesh_dim_names=("drawn",))
        agree_on_generator(again)
        if dist.get_rank() == 0:
            kept.append(again)
        del again
        gc.collect()
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_ranks_that_delete_a_mesh_at_different_times_agree_on_a_generator_as_often(pool):
    assert pool.run(agreements_on_equal_meshes, timeout=30.0) == [4.0] * 4


def collectives_of_a_tensor(ranks, source):
    """Place a tensor of other values on each rank: the collectives of each group, and what is placed."""
    of_ranks = DeviceMesh("cpu", torch.tensor(ranks))
    values = torch.arange(12.0).view(3, 4) + 100 * dist.get_rank()
    sw.distribute_tensor(
        values, of_ranks, [sw.Replicate()] * of_ranks.ndim
    )  # the first makes groups and compares rules
    logs = [group_of(of_ranks, dims).log for dims in ((0,), (1,), (0, 1))]
    before = [log.count for log in logs]
    tensor = sw.distribute_tensor(values, of_ranks, [sw.Shard(0), sw.Shard(1)], src_data_rank=source)
    counts = [log.count - count for log, count in zip(logs, before, strict=True)]
    return counts, (tensor.full_tensor() - torch.arange(12.0).view(3, 4)).unique().tolist()


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 1], [0, 2]]])
def test_a_tensor_is_placed_with_a_comparison_and_a_broadcast_over_all_mesh_dims(pool, ranks, source):
    answers = pool.run(collectives_of_a_tensor, ranks, source)
    assert answers == [([0, 0, 2], [100.0 * ranks[source][source]])] * 4


def tensors_that_differ(odd):
    shape = (5, 7) if dist.get_rank() == odd else (5, 6)
    with pytest.raises(sw.errors.RankDisagreementError, match="do not agree"):
        sw.distribute_tensor(torch.ones(shape), mesh((2, 2)), [sw.Shard(0), sw.Replicate()])
    return True


@pytest.mark.parametrize("odd", [0, 3])
def test_one_rank_with_another_tensor_shows_on_every_rank(pool, odd):
    assert pool.run(tensors_that_differ, odd) == [True] * 4


def tensors_on_equal_meshes():
    """A rank that keeps a tensor keeps its spec; the others make that spec anew, of another mesh."""
    kept = []
    for _ in range(3):
        again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = sw.distribute_tensor(torch.ones(5, 7), again, [sw.Shard(0), sw.Replicate()])
        # Groups that a program asks a tensor's mesh for are those of the same mesh on each rank.
        total = torch.ones(())
        dist.all_reduce(total, group=tensor.device_mesh.get_group("b"))
        if dist.get_rank() == 0:
            kept.append(tensor)
        del again, tensor
        gc.collect()
    return total.item()


def test_ranks_that_keep_a_tensor_use_the_groups_of_the_same_mesh_as_ranks_that_do_not(pool):
    assert pool.run(tensors_on_equal_meshes, timeout=30.0) == [2.0] * 4


def layouts_of_a_part_and_of_all(most):
    half = DeviceMesh("cpu", [0, 1])  # every rank makes it
    before, layout_agreement._MOST = layout_agreement._MOST, most
    try:
        first = sw.MeshTensor.from_local(torch.ones(5), mesh(), [sw.Shard(0)])
        if dist.get_rank() < 2:
            for n in range(6, 6 + most):
                sw.MeshTensor.from_local(torch.ones(n), half, [sw.Shard(0)])
        again = sw.MeshTensor.from_local(torch.ones(5), mesh(), [sw.Shard(0)])
        return (first + again).full_tensor().sum().item()
    finally:
        layout_agreement._MOST = before


def test_layouts_of_other_meshes_have_no_layout_compared_again(pool):
    assert pool.run(layouts_of_a_part_and_of_all, 4, timeout=30.0) == [40.0] * 4


def groups_of_ranks_with_other_groups():
    ranks = [[0, 1], [2, 3]]
    square = DeviceMesh("cpu", ranks)  # four of five ranks: over both mesh dims they are not all ranks
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    if dist.get_rank() > 3:
        return None
    return all_reduce(torch.ones(2), "sum", square, (0, 1)).tolist()


@pytest.mark.slow
@pytest.mark.sample
def test_ranks_that_have_other_groups_besides_make_a_group_together():
    with WorkerPool(5, start_method="forkserver") as five:
        assert five.run(groups_of_ranks_with_other_groups, timeout=30.0) == [[4.0, 4.0]] * 4 + [None]
