"""Gradients equal one device's, and lie where they should."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.errors import PlainTensorError, RankDisagreementError
from shardwise.testing import mesh

LAYOUTS = [
    ((4,), [Shard(0)], [Replicate()]),
    ((4,), [Replicate()], [Shard(0)]),
    ((4,), [Shard(1)], [Shard(1)]),
    ((4,), [Shard(0)], [Shard(0)]),
    ((2, 2), [Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)], [Replicate(), Replicate()]),
    ((2, 2), [Partial(), Shard(0)], [Shard(1), Partial()]),
]


def grads_of_a_product(mesh_shape, x_layout, w_layout):
    torch.manual_seed(0)
    x, w = torch.randn(5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    torch.tanh(x @ w.t()).square().sum().backward()
    m = mesh(mesh_shape)
    sx = sw.distribute_tensor(x.detach(), m, x_layout).requires_grad_()
    sw_ = sw.distribute_tensor(w.detach(), m, w_layout).requires_grad_()
    torch.tanh(sx @ sw_.t()).square().sum().backward()
    for mine, whole in ((sx, x), (sw_, w)):
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)
        expected = tuple(Replicate() if p.is_partial() else p for p in mine.placements)
        assert mine.grad.placements == expected


@pytest.mark.parametrize(("mesh_shape", "x_layout", "w_layout"), LAYOUTS)
def test_a_leafs_gradient_has_its_values_and_placements(pool, mesh_shape, x_layout, w_layout):
    pool.run(grads_of_a_product, mesh_shape, x_layout, w_layout)


def grad_through_redistribute(before, after):
    full = torch.arange(12.0).reshape(4, 3)
    x = sw.distribute_tensor(full, mesh((4,)), before).requires_grad_()
    (x.redistribute(placements=after) * 3).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((4, 3), 3.0))
    y = (x * 1).redistribute(placements=after, grad_placements=[Replicate()])
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((4, 3), 4.0))


KINDS = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_redistribute_is_differentiable(pool, before, after):
    pool.run(grad_through_redistribute, before, after)


def sent_in_other_dtypes(async_op):
    """Forward in bfloat16 and backward in float32, which show in what is sent, in the results and in the gradients."""
    full = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    x = sw.distribute_tensor(full, mesh((2,)), [Shard(0)]).requires_grad_()
    sent = []
    with events.observe(sent.append):
        y = x.redistribute(
            placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32, async_op=async_op
        )
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.full_tensor(), full.bfloat16())
        scale = sw.distribute_tensor(torch.arange(12.0).reshape(4, 3).bfloat16(), mesh((2,)), [Shard(1)])
        (y * scale).sum().backward()
    assert x.grad.dtype == torch.float64
    torch.testing.assert_close(x.grad.full_tensor(), torch.arange(12.0, dtype=torch.float64).reshape(4, 3))
    assert [(e.kind, e.nbytes) for e in sent if e.kind != "all_reduce"] == [
        ("all_gather", 2 * x.to_local().numel()),
        ("all_to_all", 4 * scale.to_local().numel()),
    ]
    z = x.detach().requires_grad_()
    same = z.redistribute(placements=[Shard(0)], backward_dtype=torch.bfloat16)
    (same / 3).sum().backward()
    torch.testing.assert_close(z.grad.full_tensor(), torch.full((4, 3), 1 / 3).bfloat16().double())
    assert z.redistribute(placements=[Replicate()], forward_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("async_op", [False, True])
def test_a_redistribution_may_send_other_dtypes(two_ranks, async_op):
    two_ranks.run(sent_in_other_dtypes, async_op)


def grad_through_local():
    m, rank = mesh((4,)), torch.distributed.get_rank()
    local = torch.full((2, 3), float(rank), requires_grad=True)
    x = MeshTensor.from_local(local, m, [Shard(0)])
    (x * x).sum().backward()
    torch.testing.assert_close(local.grad, 2 * local.detach())
    y = sw.distribute_tensor(torch.ones(8, 3), m, [Shard(0)]).requires_grad_()
    (y.to_local() * (rank + 1)).sum().backward()
    assert torch.equal(y.grad.full_tensor(), torch.arange(1.0, 5).repeat_interleave(2)[:, None].expand(8, 3))
    z = sw.distribute_tensor(torch.ones(2, 3), m, [Replicate()]).requires_grad_()
    (z.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert torch.equal(z.grad.full_tensor(), torch.full((2, 3), 10.0))


def test_local_tensors_are_differentiable_both_ways(pool):
    pool.run(grad_through_local)


def grad_to_and_from_dtensor(layout):
    m = mesh((4,))
    x = sw.distribute_tensor(torch.ones(4, 3), m, layout).requires_grad_()
    (x.to_dtensor() * 2).sum().full_tensor().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 3), 2.0))
    d = sw.distribute_tensor(torch.ones(4, 3), m, layout).to_dtensor().detach().requires_grad_()
    (MeshTensor.from_dtensor(d) * 3).sum().backward()
    assert torch.equal(d.grad.full_tensor(), torch.full((4, 3), 3.0))


@pytest.mark.parametrize("layout", [[Shard(0)], [Replicate()], [Partial()]])
def test_gradients_cross_to_and_from_dtensor(pool, layout):
    pool.run(grad_to_and_from_dtensor, layout)


def accumulates():
    m = mesh((2, 2))
    w = torch.nn.Parameter(sw.distribute_tensor(torch.ones(4, 3), m, [Shard(0), Replicate()]))
    x = sw.distribute_tensor(torch.ones(5, 4), m, [Replicate(), Shard(0)])
    for _ in range(2):
        (x @ w).sum().backward()
        assert w.grad.placements == w.placements
    assert torch.equal(w.grad.full_tensor(), torch.full((4, 3), 10.0))
    (found,) = torch.autograd.grad((x @ w).sum(), [w])
    assert found.placements == w.placements


def test_gradients_accumulate_in_the_parameters_layout(pool):
    pool.run(accumulates)


def hooks():
    m, seen = mesh((4,)), []
    w = sw.distribute_tensor(torch.ones(4, 3), m, [Shard(0)]).requires_grad_()
    w.register_hook(lambda g: g * 2)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
    y = w * 5
    y.retain_grad()
    y.sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.full((4, 3), 10.0))
    assert torch.equal(y.grad.full_tensor(), torch.ones(4, 3))
    assert seen == [(Shard(0),)]


def test_hooks_run(pool):
    pool.run(hooks)


def second_order():
    m = mesh((4,))
    full = torch.arange(1.0, 13).reshape(4, 3)
    x = sw.distribute_tensor(full, m, [Shard(0)]).requires_grad_()
    (g,) = torch.autograd.grad((x.redistribute(placements=[Replicate()]) ** 3).sum(), [x], create_graph=True)
    g.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 6 * full)


def test_a_gradient_is_differentiable(pool):
    pool.run(second_order)


def in_place(mesh_shape, layout):
    torch.manual_seed(0)
    full = torch.randn(6, 4)
    results = []
    for distributed in (False, True):
        x = sw.distribute_tensor(full, mesh(mesh_shape), layout) if distributed else full.clone()
        x.requires_grad_()
        y = x * 2
        y.mul_(1.5)
        y[1:3].add_(1)
        y.t()[2].mul_(3)
        (y * y).sum().backward()
        results.append((y.detach().full_tensor(), x.grad.full_tensor()) if distributed else (y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(("mesh_shape", "layout"), [((4,), [Replicate()]), ((2, 2), [Replicate(), Replicate()])])
def test_in_place_on_views_under_autograd(pool, mesh_shape, layout):
    pool.run(in_place, mesh_shape, layout)


def recomputed(layout):
    with sw.random.using("torch"):  # whatever a test before this one seeded
        compare_with_recomputation(layout)


def compare_with_recomputation(layout):
    torch.manual_seed(0)
    x, w = torch.randn(4, 6), torch.randn(6, 6)

    def block(a, b):
        return functional.dropout(torch.relu(a @ b), 0.5) @ b

    grads = []
    for use in (False, True):
        torch.manual_seed(3)
        a = sw.distribute_tensor(x, mesh((2, 2)), layout).requires_grad_()
        b = sw.distribute_tensor(w, mesh((2, 2)), [Replicate(), Shard(1)]).requires_grad_()
        y = checkpoint(block, a, b, use_reentrant=False) if use else block(a, b)
        y.sum().backward()
        grads.append((y.detach().full_tensor(), a.grad.full_tensor(), b.grad.full_tensor()))
    torch.testing.assert_close(grads[1], grads[0])
    torch.manual_seed(3)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = block(a, b)
    y.sum().backward()
    torch.testing.assert_close(grads[0], (y.detach(), a.grad, b.grad))


@pytest.mark.parametrize("layout", [[Shard(0), Replicate()], [Replicate(), Replicate()]])
def test_checkpointing_recomputes_the_same_dropout(pool, layout):
    pool.run(recomputed, layout)


def without_a_gradient():
    """torch's formulas of foreach ops leave out the gradients of list positions whose results nothing uses."""
    x, y = (sw.ones(8, 4, device_mesh=mesh((4,)), placements=[Shard(0)]).requires_grad_() for _ in range(2))
    from_local = sw.MeshTensor.from_local(x.to_local(), mesh((4,)), [Shard(0)])
    for moved in (x.redistribute(placements=[Shard(1)]), from_local):
        _, used = torch._foreach_mul([moved, y], [2.0, 3.0])
        used.sum().backward()
        assert x.grad is None
        assert y.grad is not None


def test_where_one_device_has_no_gradient_other_layouts_have_none(pool):
    pool.run(without_a_gradient)


def unused_results(layout):
    full = torch.arange(24.0).reshape(4, 6)
    x = sw.distribute_tensor(full, mesh((4,)), layout).requires_grad_()
    (x.split(2)[1] * 3).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.tensor([0.0, 0, 3, 3])[:, None].expand(4, 6))


@pytest.mark.parametrize("layout", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_results_that_nothing_uses_have_no_gradient(pool, layout):
    pool.run(unused_results, layout)


def product_of_zeros(layout):
    full = torch.arange(6.0).reshape(2, 3)
    x, expected = sw.distribute_tensor(full, mesh((4,)), layout).requires_grad_(), full.clone().requires_grad_()
    x.prod(1).sum().backward()
    expected.prod(1).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("layout", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_the_gradient_of_a_product_with_a_zero(pool, layout):
    pool.run(product_of_zeros, layout)


class WritesPlain(torch.autograd.Function):
    """Its backward writes into a plain tensor, as torch's chunked cross entropy does into fresh memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.mm(gradient, x, out=torch.zeros(4, 4))


def writing_a_plain_tensor():
    x = sw.distribute_tensor(torch.ones(4, 4), mesh((4,)), [Replicate()]).requires_grad_()
    WritesPlain.apply(x).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 4), 4.0))
    with sw.plain("refuse"), pytest.raises(PlainTensorError, match="'out'"):
        WritesPlain.apply(x).sum().backward()


def test_a_plain_tensor_is_written_in_a_backward(pool):
    """Where plain tensors are refused: fresh memory is zeros on some ranks and not on others, and all refuse it."""
    pool.run(writing_a_plain_tensor)


class DifferentBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 1

    @staticmethod
    def backward(_, grad):
        return torch.full(grad.shape, float(dist.get_rank()))


def different_gradients():
    x = sw.distribute_tensor(torch.ones(4, 4), mesh((4,)), [Replicate()]).requires_grad_()
    with pytest.raises(RankDisagreementError, match=r"gradient of a MeshTensor.*on rank 3"):
        DifferentBackward.apply(x).sum().backward()


def test_a_plain_gradient_that_differs_between_ranks_is_an_error(pool):
    pool.run(different_gradients)
