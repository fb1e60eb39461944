"""``nn.SyncBatchNorm`` on a mesh."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import ArgumentError
from shardwise.testing import mesh


def trained(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    model.eval()
    return [model(x).detach(), *model.state_dict().values()]


def as_batch_norm(placement):
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one))
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    expected = trained(one, x)
    m = mesh((2,))
    sw.distribute_module(model, m, {"1.*s": Replicate()})
    assert type(model[1]) is nn.SyncBatchNorm
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    found = trained(model, sw.distribute_tensor(x, m, [placement]))
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value.full_tensor(), right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("placement", [Shard(0), Shard(2)], ids=str)
def test_it_takes_the_statistics_of_the_whole_batch(two_ranks, placement):
    two_ranks.run(as_batch_norm, placement)


def of_some_ranks():
    group = dist.new_group([0])
    model = nn.Sequential(nn.SyncBatchNorm(4, process_group=group))
    with pytest.raises(ArgumentError, match="submodule '0' is a SyncBatchNorm with a process group"):
        sw.distribute_module(model, mesh((2,)))
    assert type(model[0].weight) is nn.Parameter


def test_one_that_joins_some_ranks_is_refused(two_ranks):
    two_ranks.run(of_some_ranks)
