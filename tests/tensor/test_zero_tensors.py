"""Tensors of torch's own that stand for zeros and have no memory: kernels that read them crash the interpreter.

The gradient of ``sgn`` is one, for example.
"""

import pytest
import torch

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.testing import mesh


def step_with(write, plain):
    """Gradients of a tensor that reaches a loss by two ways, one of them through ``write``, after an optimizer's step.

    The same on one device if ``plain``.
    """
    x = torch.tensor([1.5, -0.5, 2.0, -3.0], requires_grad=True)
    if not plain:
        x = sw.distribute_tensor(x.detach(), mesh((2,)), [Shard(0)]).requires_grad_()
    optimizer = torch.optim.AdamW([x], lr=0.1, foreach=True)
    for _ in range(2):
        y = x if plain else x.redistribute(placements=[Replicate()])
        torch.autograd.backward([write(y).sum(), (y * x).sum()])
        optimizer.step()
    found = x.grad, x.detach()
    return list(found) if plain else [t.full_tensor() for t in found]


WRITES = {
    "sgn": lambda y: (y * 1).sgn(),
    "sgn_": lambda y: (y * 1).sgn_(),
    "sgn_ of what was moved": lambda y: (
        y.redistribute(placements=[Replicate()]).sgn() if hasattr(y, "_spec") else y.sgn()
    ),
    "sgn of the local part": lambda y: (
        MeshTensor.from_local(y.to_local().sgn(), y.device_mesh, [Replicate()]) if hasattr(y, "_spec") else y.sgn()
    ),
}


def trained(name):
    torch.testing.assert_close(step_with(WRITES[name], plain=False), step_with(WRITES[name], plain=True))


@pytest.mark.parametrize("name", WRITES)
def test_a_gradient_without_memory_is_added_to_another(two_ranks, name):
    two_ranks.run(trained, name)


def averaged():
    """A gradient that autograd leaves in an in-place op, above a partial average: found by a random program."""
    m = mesh((2,))
    x = sw.distribute_tensor(torch.tensor(1.5), m, [Replicate()]).requires_grad_()
    y = sw.distribute_tensor(torch.ones(3, 5), m, [Shard(0)]).requires_grad_()
    partial = x.redistribute(placements=[Partial("avg")])
    sign = partial.redistribute(placements=[Replicate()]).sgn_()
    product = partial * y
    torch.autograd.backward([sign, product.sum()], [torch.ones_like(sign), None])
    return x.grad.full_tensor().item()


def test_a_gradient_without_memory_meets_that_of_a_partial_average(two_ranks):
    assert two_ranks.run(averaged) == [15.0, 15.0]


def from_zeros(strided):
    m = mesh((2,))
    zeros = torch._efficientzerotensor((4, 2))
    if strided:
        zeros = zeros.t()
    tensor = MeshTensor.from_local(zeros, m, [Shard(0)])
    assert not tensor.to_local()._is_zerotensor()
    return (tensor + torch.ones_like(tensor)).full_tensor()


@pytest.mark.parametrize("strided", [False, True])
def test_a_part_without_memory_has_memory_on_the_mesh(two_ranks, strided):
    for whole in two_ranks.run(from_zeros, strided):
        assert torch.equal(whole, torch.ones((4, 4) if strided else (8, 2)))
