"""Ops in place that no row lets write where it is: the numbers of one device, and the tensor keeps its placements."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.private_torch.placements import strided_shard
from shardwise.testing import mesh

aten = torch.ops.aten
MINE = torch.tensor([[1.0, -2.0, 3.0], [-0.5, 0.25, -4.0]])
WRITES = {
    "clamp_": lambda x: x.clamp_(-1, 2),
    "fill_": lambda x: x.fill_(3),
    "relu_": torch.relu_,
    "exp_": lambda x: x.exp_(),
    "mul_": lambda x: x.mul_(2),
    "abs_": lambda x: x.abs_(),
    "neg_": lambda x: x.neg_(),
    "zero_": lambda x: x.zero_(),
    "eq_": lambda x: x.eq_(4),
    "add_": lambda x: x.add_(1),
    "cumsum_": lambda x: x.cumsum_(1),
    "setitem": lambda x: x.__setitem__((0, slice(1, 3)), 7.0),
    "row": lambda x: x[1].sqrt_(),
    "out": lambda x: torch.exp(x, out=x),
    "dropout": lambda x: functional.dropout(x, 0.5, True, True),
    "foreach": lambda x: torch._foreach_sigmoid_([x]),
    "inplace relu": torch.nn.ReLU(inplace=True),
    "leaky_relu_": lambda x: functional.leaky_relu(x, 0.1, True),
    "uniform_": lambda x: x.uniform_(),
}


def parts(kind):
    """The part of this rank and the reduced tensor."""
    each = [MINE * (r + 1) for r in range(dist.get_world_size())]
    stacked = torch.stack(each)
    whole = {"sum": stacked.sum(0), "max": stacked.amax(0), "avg": stacked.mean(0), "product": stacked.prod(0)}[kind]
    return each[dist.get_rank()].clone(), whole


def write(kinds):
    for kind in kinds:
        for name, program in WRITES.items():
            local, whole = parts(kind)
            x = sw.MeshTensor.from_local(local, mesh((4,)), [Partial(kind)])
            view = x.t()
            torch.manual_seed(0)
            with sw.random.using("torch"):
                program(x)
            torch.manual_seed(0)
            program(whole)
            assert x.placements == (Partial(kind),), name
            for actual in (x, view.t()):
                assert torch.allclose(actual.full_tensor(), whole, equal_nan=True), name


def test_a_write_to_a_partial_sum(pool):
    pool.run(write, ["sum"])


@pytest.mark.slow
@pytest.mark.sample
def test_a_write_to_other_partial_tensors(pool):
    pool.run(write, ["max", "avg", "product"])


def write_beside_strided_shards():
    """The row that reduces a partial tensor runs a lowering, which does not run on strided shards."""
    whole, places = torch.arange(24.0).sin() * 3, [Partial(), strided_shard(0, 4)]
    for program in (lambda x: x.clamp_(-1, 2), lambda x: x.pow_(2), lambda x: x.cumsum_(0)):
        x = sw.distribute_tensor(whole, mesh((2, 2)), [Replicate(), Replicate()]).redistribute(placements=places)
        program(x)
        assert torch.allclose(x.full_tensor(), program(whole.clone()), atol=1e-5)
        assert list(x.placements) == places


def test_a_write_to_a_partial_tensor_with_strided_shards(pool):
    pool.run(write_beside_strided_shards)


def write_on_two_mesh_dims():
    x = sw.MeshTensor.from_local(MINE.clone(), mesh((2, 2)), [Shard(0), Partial()])
    whole = torch.cat([MINE, MINE]) * 2
    x.sigmoid_()
    assert x.placements == (Shard(0), Partial())
    torch.testing.assert_close(x.full_tensor(), whole.sigmoid_())


def test_other_mesh_dims_stay_as_they_are(pool):
    pool.run(write_on_two_mesh_dims)


def differentiate():
    w = torch.linspace(-1, 1, 12).view(3, 4)
    x = torch.linspace(-2, 1, 8).view(4, 2)
    grads = []
    for whole in (True, False):
        one, two = w.clone().requires_grad_(), x.clone().requires_grad_()
        if not whole:
            one = sw.distribute_tensor(w, mesh((4,)), [Shard(1)]).requires_grad_()
            two = sw.distribute_tensor(x, mesh((4,)), [Shard(0)]).requires_grad_()
        y = one @ two
        assert whole or y.placements == (Partial(),)
        torch.relu_(y).pow(2).sum().backward()
        grads.append([t.grad if whole else t.grad.full_tensor() for t in (one, two)])
    torch.testing.assert_close(*grads)


def test_gradients_of_a_write_to_a_partial_sum(pool):
    pool.run(differentiate)


SHARDED = {
    "masked_scatter_": lambda x, y: x.masked_scatter_(y > 0, y.abs()),
    "put_": lambda x, y: x.put_(torch.tensor([0, 7, 11]), y[0]),
    "put_ and add": lambda x, y: x.put_(torch.tensor([0, 7, 7]), y[1], accumulate=True),
    "renorm_": lambda x, _: x.renorm_(2, 1, 0.5) + x.renorm_(2, 0, 0.4),
    "cat, out": lambda x, y: torch.cat([y[:3], x[3:].clone()], out=x),
    "row of it": lambda x, y: x[1:].put_(torch.tensor([0, 8]), y[2, :2]),
    "product": lambda x, y: x.addmm_(y, y[:3]),
}


def write_shards(name):
    for meshes, layouts in (((4,), ([Shard(0)], [Shard(1)])), ((2, 2), ([Shard(1), Shard(0)], [Shard(0), Partial()]))):
        for layout in layouts:
            x, y = torch.arange(1.0, 13.0).view(4, 3).cos(), torch.arange(12.0).view(4, 3).sin()
            placed = sw.distribute_tensor(x, mesh(meshes), layout)
            view, other = placed.t(), sw.distribute_tensor(y, mesh(meshes), [Replicate()] * len(meshes))
            SHARDED[name](x, y)
            SHARDED[name](placed, other)
            assert placed.placements == tuple(layout)
            torch.testing.assert_close(placed.full_tensor(), x)
            torch.testing.assert_close(view.full_tensor(), x.t())


@pytest.mark.parametrize("name", SHARDED)
def test_a_write_to_a_shard_that_no_row_writes(pool, name):
    pool.run(write_shards, name)


OVERWRITES = {
    "out": lambda x, y: torch.exp(y, out=x),
    "two operands, out": lambda x, y: torch.mul(y, y, out=x),
    "cat, out": lambda x, y: torch.cat([y[:1], y[1:]], out=x),
    "out= that is an operand": lambda x, _: torch.exp(x, out=x),
    "zero_": lambda x, _: x.zero_(),
    "copy_": lambda x, y: x.copy_(y),
}


def overwrite(name):
    """Nothing of what is overwritten is sent, unless the op reads it."""
    program = OVERWRITES[name]
    local, whole = parts("sum")
    x = sw.MeshTensor.from_local(local, mesh((4,)), [Partial("sum")])
    y = sw.distribute_tensor(MINE, mesh((4,)), [Replicate()])
    view, events = x.t(), []
    with observe(events.append):
        program(x, y)
    program(whole, MINE)
    assert x.placements == (Partial("sum"),)
    for actual in (x, view.t()):
        torch.testing.assert_close(actual.full_tensor(), whole)
    assert len(events) == (name == "out= that is an operand")


@pytest.mark.parametrize("name", OVERWRITES)
def test_what_is_overwritten_is_not_sent(pool, name):
    pool.run(overwrite, name)


def explain_overwritten():
    x = sw.MeshTensor.from_local(MINE.clone(), mesh((4,)), [Partial()])
    y = sw.distribute_tensor(MINE, mesh((4,)), [Replicate()])
    explanation = sw.explain(aten.exp.out, y, out=x)
    assert not explanation.redistributions
    assert explanation.results[0].placements == (Partial(),)


def test_what_is_overwritten_is_not_explained_as_sent(pool):
    pool.run(explain_overwritten)


def explain_beside_strided_shards():
    whole, places = torch.arange(24.0), [Partial(), strided_shard(0, 4)]
    x = sw.distribute_tensor(whole, mesh((2, 2)), [Replicate(), Replicate()]).redistribute(placements=places)
    explanation = sw.explain(aten.clamp_.default, x, -1, 2)
    assert [r.operand for r in explanation.redistributions] == ["self"]
    assert list(explanation.results[0].placements) == places


def test_a_write_beside_strided_shards_is_explained(pool):
    pool.run(explain_beside_strided_shards)


def explained():
    x = sw.MeshTensor.from_local(MINE.clone(), mesh((4,)), [Partial()])
    explanation = sw.explain(aten.relu_.default, x)
    assert [(r.operand, r.target.placements) for r in explanation.redistributions] == [("self", (Replicate(),))]
    assert explanation.results[0].placements == (Partial(),)


def test_the_reduction_is_explained(pool):
    pool.run(explained)
