"""Composite ops: what they make on the way lies on the mesh, plain tensors are compared."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import one_hot

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.engine.composites import replicating
from shardwise.errors import NoRuleError, RankDisagreementError
from shardwise.private_torch.ops import draws
from shardwise.testing import mesh

aten = torch.ops.aten
CLASSES = torch.tensor([[0, 3, 1], [2, 2, 0], [4, 1, 3], [0, 0, 1]])
QUERIES = torch.linspace(-1, 1, 2 * 4 * 6 * 8).view(2, 4, 6, 8).cos()


def composites():
    """What ranks find, by name: the whole result and the whole gradient."""
    grid, found = mesh((4,)), {}

    def put(tensor, *places):
        return sw.distribute_tensor(tensor, grid, places)

    found["one_hot"] = one_hot(put(CLASSES, Shard(0)), 5).full_tensor(), None
    for name, places in (("heads", Shard(1)), ("replicated", Replicate())):
        q = put(QUERIES, places).requires_grad_()
        out, _ = aten._scaled_dot_product_attention_math.default(q, q, q, is_causal=True)
        out.square().sum().backward()
        found[f"attention {name}"] = out.full_tensor(), q.grad.full_tensor()
    x = put(QUERIES[0, 0, :4, :4].contiguous(), Shard(0)).requires_grad_()
    (torch.quantile(x, 0.3, dim=1).sum() + torch.trace(x) + torch.mvlgamma(x + 3, 2).sum()).backward()
    found["several"] = torch.matrix_power(x, 0).full_tensor(), x.grad.full_tensor()
    found["split"] = torch.tensor_split(x, put(torch.tensor([1, 3]), Replicate()), 1)[1].full_tensor(), None
    return {name: tuple(None if t is None else t.detach() for t in pair) for name, pair in found.items()}


def test_composite_ops_give_the_numbers_of_one_device(pool):
    q = QUERIES.clone().requires_grad_()
    out, _ = aten._scaled_dot_product_attention_math.default(q, q, q, is_causal=True)
    out.square().sum().backward()
    x = QUERIES[0, 0, :4, :4].clone().requires_grad_()
    (torch.quantile(x, 0.3, dim=1).sum() + torch.trace(x) + torch.mvlgamma(x + 3, 2).sum()).backward()
    wanted = {
        "one_hot": (one_hot(CLASSES, 5), None),
        "attention heads": (out, q.grad),
        "attention replicated": (out, q.grad),
        "several": (torch.matrix_power(x, 0), x.grad),
        "split": (x[:, 1:3], None),
    }
    for found in pool.run(composites):
        for name, pair in wanted.items():
            torch.testing.assert_close(found[name], tuple(None if t is None else t.detach() for t in pair))


def alone():
    """On every rank: what a composite op does with a plain operand, and with random numbers of its own."""
    grid = mesh((4,))
    x = sw.distribute_tensor(torch.ones(4, 4), grid, [Shard(0)])
    found, _ = aten._scaled_dot_product_attention_math.default(x[None], x[None], torch.ones(1, 4, 4))
    assert torch.equal(found.full_tensor(), torch.ones(1, 4, 4))
    with pytest.raises(RankDisagreementError):
        aten._scaled_dot_product_attention_math.default(x[None], x[None], torch.full((1, 4, 4), dist.get_rank() + 1.0))
    with replicating(sw.MeshTensor, grid):
        made = torch.arange(4.0).view(2, 2)
        whole = torch.zeros(())
        with pytest.raises(NoRuleError, match="random"):
            torch.rand(3)
    assert draws(aten.rand.default)
    return type(made), made.placements, type(whole)


def test_a_plain_operand_is_compared_and_draws_are_refused(pool):
    assert set(pool.run(alone)) == {(sw.MeshTensor, (Replicate(),), torch.Tensor)}


def test_plain_tensors_and_fake_ones_pass_by():
    assert torch.equal(one_hot(CLASSES, 5).argmax(-1), CLASSES)
    with torch._subclasses.FakeTensorMode() as fakes:
        assert one_hot(fakes.from_tensor(CLASSES), 5).shape == (4, 3, 5)


def zeros_as_gradients():
    leaf = sw.distribute_tensor(torch.ones(4, 2), mesh((4,)), [Shard(0)]).requires_grad_()
    torch.sgn(leaf).sum().backward()
    return leaf.grad.placements, leaf.grad.full_tensor()


def test_plain_zeros_of_autograds_formulas_are_gradients(pool):
    for placements, whole in pool.run(zeros_as_gradients):
        assert placements == (Shard(0),)
        assert torch.equal(whole, torch.zeros(4, 2))
