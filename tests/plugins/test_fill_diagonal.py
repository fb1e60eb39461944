"""``fill_diagonal_`` of tensors and of views, on real ranks."""

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh

VIEWS = (
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[1:],
    lambda x: x[2:].t(),
    lambda x: x[4:6],
    lambda x: x[:, 1:],
    lambda x: x[::2],
    lambda x: x[:8].view(2, 2, 4)[..., :2],
)


def fill_views():
    numbers = torch.arange(18.0).view(9, 2)
    for placement in (Replicate(), Shard(0), Shard(1)):
        for view in VIEWS:
            for wrap in (False, True):
                expected = numbers.clone()
                whole = view(expected)
                if wrap and not whole.is_contiguous():
                    continue
                whole.fill_diagonal_(-9.0, wrap)
                x = sw.distribute_tensor(numbers, mesh((4,)), [placement])
                part = view(x)
                assert part.fill_diagonal_(-9.0, wrap=wrap) is part
                assert torch.equal(part.full_tensor(), whole)
                assert torch.equal(x.full_tensor(), expected)


def test_views_are_filled_as_on_one_device(pool):
    pool.run(fill_views)


def gradients_and_refusals():
    x = sw.distribute_tensor(torch.ones(4, 4), mesh((4,)), [Shard(0)]).requires_grad_()
    y = x * 2
    y[:, 1:].fill_diagonal_(7.0)
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 - 2 * torch.zeros(4, 4).diagonal_scatter(torch.ones(3), 1))
    for refused in (x.detach()[0], x.detach().view(4, 2, 2)):
        with pytest.raises(RuntimeError, match="dimensions"):
            refused.fill_diagonal_(1.0)


def test_gradients_and_errors_are_those_of_one_device(pool):
    pool.run(gradients_and_refusals)
