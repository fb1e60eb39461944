"""Views in compiled code: what is written to a view, or to its base, is seen by the other as on one device."""

import gc

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import InPlaceError
from shardwise.kernel import view_copies
from shardwise.testing import mesh

LAYOUTS = {"S(0)": [Shard(0)], "S(1)": [Shard(1)], "R": [Replicate()], "P": [Partial("sum")]}


def read(x):
    return x.view(-1, 3).sum(1) * 2


def write_flat(x):
    y = x * 2
    y.view(-1)[3] = 7.0
    return y + 1


def write_base(x):
    y = x * 2
    flat, row = y.view(-1), y[1]
    y[1] = 5.0
    y.mul_(3)
    return flat * row.sum()


def rows(x):
    y = x + 1
    y[0].zero_()
    y[1:4].mul_(3)
    y[2:6][1:3] = 4.0
    for row in y.unbind(0)[5:]:
        row.add_(1)
    a, b, c = y.split([3, 3, 2])
    a.copy_(b)
    return y, a, b + c.sum()


def inner(x):
    y = x * 1
    y.view(-1).add_(1)
    y.t()[2].zero_()
    y.diagonal().zero_()
    y.narrow(0, 1, 5).select(0, 2).fill_(3)
    z = y.unflatten(0, (2, 4))
    z[1, 2].zero_()
    return y, z


def write_input(x):
    x.view(-1)[5].zero_()
    x[3].add_(x[4])
    x[0].fill_(4.0)
    return x.sum(0)


def gradient_of_view(x):
    y = x * 2
    flat = y.view(-1).view(4, 12)
    flat[1].mul_(3.0)
    y.add_(1.0)
    product = flat[1] * flat[2]
    return (product * product).sum() + y.sum()


def gradient_of_loop(x):
    y = torch.zeros_like(x) + x * 0
    for i in range(8):
        y[i] = x[i] * i + (y[i - 1] if i else 0)
    return (y * y).sum()


PROGRAMS = read, write_flat, write_base, rows, inner, write_input, gradient_of_view, gradient_of_loop


def compare(programs, layouts, backend, dynamic=False):
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for program in programs:
        for layout in layouts:
            torch._dynamo.reset()
            reference = whole.clone()
            part = sw.distribute_tensor(whole.clone(), mesh((2,)), [Replicate()])
            x = part.redistribute(placements=LAYOUTS[layout]).clone().detach()
            for tensor in (reference, x):
                tensor.requires_grad_(program.__name__.startswith("gradient"))
            expected = program(reference)
            actual = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(x)
            if not isinstance(expected, tuple):
                expected, actual = (expected,), (actual,)
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other)
            torch.testing.assert_close(x.full_tensor(), reference)
            if x.requires_grad:
                actual[0].backward()
                expected[0].backward()
                torch.testing.assert_close(x.grad.full_tensor(), reference.grad)


def test_views_that_move_are_read_and_written_in_compiled_code(two_ranks):
    two_ranks.run(compare, [write_flat, write_base, write_input], ["S(0)"], "aot_eager", timeout=240)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_views_of_all_layouts(two_ranks, program):
    two_ranks.run(compare, [program], LAYOUTS, "aot_eager", timeout=240)


@pytest.mark.slow
def test_views_of_sizes_that_may_change(two_ranks):
    two_ranks.run(compare, [read, write_base, write_input], ["S(0)", "S(1)"], "aot_eager", True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_views_in_inductor(two_ranks, program):
    two_ranks.run(compare, [program], ["S(0)", "S(1)"], "inductor", timeout=280)


def leaves_the_graph():
    x = sw.distribute_tensor(torch.arange(6.0), mesh((2,)), [Shard(0)])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def first(x):
        return x.view(2, 3)[0]

    row = first(x)
    gc.collect()
    assert not view_copies.watched, "writes stay slow after a graph was made"
    torch.testing.assert_close(row.full_tensor(), torch.arange(3.0))
    with pytest.raises(InPlaceError):
        row.zero_()


def test_a_copy_of_a_view_that_leaves_a_graph_is_not_written(two_ranks):
    two_ranks.run(leaves_the_graph)


def pooled_to_a_point():
    """Torch's average over all positions of a channels-last tensor is turned by as_strided, and so is its gradient."""
    grid = mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    values = torch.randn(8, 4, 6, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    answers = []
    for is_placed in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
        x = values
        if is_placed:
            sw.distribute_module(model, grid, {"0.weight": {"tp": Shard(1)}, "0.bias": {"tp": Shard(0)}})
            x = sw.distribute_tensor(values, grid, [Shard(0), Replicate()])
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        result = model(x)
        result.square().sum().backward()
        answers.append([result.detach(), *(p.grad for p in model.parameters())])
    for expected, found in zip(*answers, strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, atol=1e-12, rtol=1e-9)


def test_a_pool_of_channels_last_compiles(pool):
    pool.run(pooled_to_a_point)
