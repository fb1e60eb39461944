"""Attention in its math form runs as one op each way, with the numbers that torch's composite has on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh

HERE = ("shardwise.attention_math.default", "shardwise.attention_math_backward.default")
LAYOUTS = [[Shard(0), Shard(1)], [Shard(2), Shard(1)], [Shard(1), Replicate()], [Shard(2), Shard(2)]]


class Seen(TorchDispatchMode):
    """The names of the ops that a program dispatches."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


def operands(few=4, dtype=torch.float64, keys=6):
    torch.manual_seed(0)
    shapes = [(4, 4, 8, 6), (4, few, keys, 6), (4, few, keys, 6)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def attend(q, k, v, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, sw.MeshTensor) else tensor


def placed(tensors, layout):
    return [sw.distribute_tensor(t, mesh((2, 2)), layout).requires_grad_() for t in tensors]


def same(found, expected, dtype=torch.float64):
    within = {"rtol": 1e-12, "atol": 1e-13}
    if dtype == torch.bfloat16:  # the parts of a sum are rounded one by one
        within = {"rtol": 2**-6, "atol": 2**-8 * float(expected.detach().abs().max())}
    torch.testing.assert_close(whole(found), expected.detach(), **within)


def trains(layout, few, dtype, options):
    full = [t.requires_grad_() for t in operands(few, dtype)]
    parts = placed([t.detach() for t in full], layout)
    shared = {name: sw.distribute_tensor(v, mesh((2, 2))) if torch.is_tensor(v) else v for name, v in options.items()}
    expected, found = attend(*full, **options), attend(*parts, **shared)
    same(found, expected, dtype)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    (expected * weights).sum().backward()
    (found * sw.distribute_tensor(weights, mesh((2, 2)))).sum().backward()
    for part, one in zip(parts, full, strict=True):
        same(part.grad, one.grad, dtype)


MASK = torch.arange(48).view(8, 6) % 3 > 0
CALLS = {
    "plain": (4, torch.float64, {}),
    "causal": (4, torch.float64, {"is_causal": True}),
    "scaled": (4, torch.float64, {"scale": 0.7}),
    "scaled below zero": (4, torch.float64, {"scale": -0.7}),
    "mask": (4, torch.float64, {"attn_mask": MASK}),
    "bias": (4, torch.float64, {"attn_mask": MASK.double()}),
    "a row without keys": (4, torch.float64, {"attn_mask": MASK & (torch.arange(8) != 2)[:, None]}),
    "grouped": (2, torch.float64, {"enable_gqa": True, "is_causal": True}),
    "bfloat16": (4, torch.bfloat16, {}),
}


def trains_in_all_layouts(*call):
    for layout in LAYOUTS:
        trains(layout, *call)


@pytest.mark.parametrize("call", CALLS)
def test_numbers_are_those_of_one_device(pool, call):
    pool.run(trains_in_all_layouts, *CALLS[call])


def counts_ops():
    q, k, v = placed(operands(), [Shard(1), Replicate()])
    with Seen() as seen:
        attend(q, k, v).sum().backward()
    return [op for op in seen.ops if "attention" in op or "mm" in op or "softmax" in op]


def test_each_way_is_one_op(pool):
    assert pool.run(counts_ops) == [list(HERE)] * 4


def differentiates_twice():
    full = [t.requires_grad_() for t in operands()]
    parts = placed([t.detach() for t in full], [Shard(1), Shard(0)])
    for tensors in (full, parts):
        first = torch.autograd.grad(attend(*tensors).square().sum(), tensors, create_graph=True)
        sum(g.square().sum() for g in first).backward()
    for part, one in zip(parts, full, strict=True):
        torch.testing.assert_close(whole(part.grad), one.grad, rtol=1e-10, atol=1e-11)


def test_second_derivatives(pool):
    pool.run(differentiates_twice)


def runs_in_parts():
    """What the op has no formula for runs as torch composes it."""
    full, m = operands(), mesh((2, 2))
    bias = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    parts, shared = placed(full, [Shard(1), Shard(0)]), sw.distribute_tensor(bias.detach(), m).requires_grad_()
    expected, found = attend(*full, attn_mask=bias), attend(*parts, attn_mask=shared)
    same(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(whole(shared.grad), bias.grad)
    with forward_ad.dual_level():
        expected, found = (
            forward_ad.unpack_dual(attend(forward_ad.make_dual(ts[0], torch.ones_like(ts[0])), *ts[1:])).tangent
            for ts in (full, [t.detach() for t in parts])
        )
        torch.testing.assert_close(whole(found), expected)
    aten = torch.ops.aten
    (expected, weights), (found, ours) = (
        aten._scaled_dot_product_attention_math.default(*ts) for ts in (full, [t.detach() for t in parts])
    )
    same(found, expected)
    same(ours, weights)


def test_masks_that_learn_forward_mode_and_weights(pool):
    pool.run(runs_in_parts)


def weights_get_gradients():
    full = [t.requires_grad_() for t in operands()]
    parts = placed([t.detach() for t in full], [Shard(1), Shard(0)])
    for tensors in (full, parts):
        result, weights = torch.ops.aten._scaled_dot_product_attention_math.default(*tensors)
        (result.sum() + weights.square().sum()).backward()
    for part, one in zip(parts, full, strict=True):
        torch.testing.assert_close(whole(part.grad), one.grad, rtol=1e-10, atol=1e-12)


def test_gradients_of_the_weights(pool):
    pool.run(weights_get_gradients)
