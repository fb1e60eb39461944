"""Ops whose gradient compares an operand with the result: a partial operand is reduced once, for both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.testing import mesh

CALLS = {
    "amax": lambda x, _: x.amax(0),
    "aminmax": lambda x, _: sum(torch.aminmax(x, dim=0)),
    "cdist": lambda x, y: torch.cdist(x, y, math.inf),
    "dist": lambda x, y: torch.dist(x, y, math.inf),
    "dist to the nearest": lambda x, y: torch.dist(y, x, -math.inf),
    "index_reduce": lambda x, y: torch.zeros_like(y).index_reduce(
        0, (y[:, 0] * 0).long(), x, "amax", include_self=False
    ),
    "max": lambda x, _: x.max(),
    "median": lambda x, _: x.median(),
    "min": lambda x, _: x.min(),
    "nanmedian": lambda x, _: x.nanmedian(),
    "norm": lambda x, _: x.norm(math.inf),
    "pdist": lambda x, _: torch.pdist(x, math.inf),
    "scatter_reduce": lambda x, y: torch.zeros_like(y).scatter_reduce(0, (y * 0).long(), x, "amax", include_self=False),
    "vector_norm": lambda x, _: torch.linalg.vector_norm(x, -math.inf, 1),
}


def gradients(call: str, kinds: tuple[str, ...]) -> None:
    device_mesh = mesh((4,) if len(kinds) == 1 else (2, 2))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randn(4, 8, 6, generator=generator)
        y, direction = torch.randn(8, 6, generator=generator), torch.randn(8, 8, generator=generator)
        share = parts[device_mesh.get_rank()]
        x = MeshTensor.from_local(share, device_mesh, [Partial(kind) for kind in kinds]).requires_grad_()
        whole = x.full_tensor().detach().requires_grad_()
        expected = CALLS[call](whole, y)
        weights = direction.flatten()[: expected.numel()].view(expected.shape)
        (expected * weights).sum().backward()
        result = CALLS[call](x, replicated(y, device_mesh))
        (result * replicated(weights, device_mesh)).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)


def replicated(value: Tensor, device_mesh: object) -> MeshTensor:
    return sw.distribute_tensor(value, device_mesh, [Replicate()] * device_mesh.ndim)


WITHOUT_DERIVATIVE = {"aminmax"} if torch.__version__ < "2.12" else set()


@pytest.mark.parametrize("call", CALLS)
def test_the_gradient_finds_the_element_that_the_result_was_taken_from(pool, call):
    if call in WITHOUT_DERIVATIVE:
        pytest.skip("this torch has no derivative of it")
    pool.run(gradients, call, ("sum",))
    pool.run(gradients, call, ("avg", "sum"))


def reductions() -> None:
    device_mesh = mesh((4,))
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    def collectives(placement, needs_grad):
        x = sw.distribute_tensor(values, device_mesh, [placement]).requires_grad_(needs_grad)
        events = []
        with observe(events.append):
            largest = x.amax(0)
            if needs_grad:
                largest.sum().backward()
        return [event.kind for event in events]

    assert len(collectives(Partial("sum"), needs_grad=True)) == 1  # what is saved for backward is the reduced copy
    assert collectives(Partial("max"), needs_grad=False) == []  # without a gradient the rule decides
    x = sw.distribute_tensor(values, device_mesh, [Shard(0)]).requires_grad_()
    assert x.amax(1).placements == (Shard(0),)


def test_the_operand_is_reduced_once(pool):
    pool.run(reductions)
