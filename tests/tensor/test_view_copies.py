"""Views that had to be copies: they follow their base, and their base follows them, as where memory is shared."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.errors import InPlaceError
from shardwise.kernel import view_copies
from shardwise.testing import mesh

LAYOUTS = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()]]


def values():
    return torch.arange(48.0).view(8, 6).sin()


def equal(found, wanted):
    torch.testing.assert_close(found.full_tensor() if isinstance(found, MeshTensor) else found, wanted)


# -- programs: each returns one more tensor to compare, besides its operand --------------------------------------------


def row(x):
    x[0] = 1.0
    return x[1]


def rows(x):
    x[2:4].zero_()
    x.chunk(3)[1].fill_(7.0)
    return x.sum()


def element_of_a_flat_view(x):
    x.view(-1)[5] = 9.0
    return x[0]


def read_after_a_write_to_the_base(x):
    flat, first = x.view(-1), x[0]
    x.add_(1)
    return torch.cat([flat, first])


def view_of_a_view(x):
    window = x.view(4, 12)[1:3]
    window.mul_(2)
    x.sub_(3)
    return window


def windows(x):
    x.unfold(0, 2, 3)[1] = 4.0
    x.unfold(1, 2, 2)[:, :, 1].neg_()
    x.unfold(0, 8, 1).add_(1)
    x.unfold(1, 2, 4).unfold(0, 4, 4)[0, 1].mul_(2)
    return x.unfold(0, 3, 3)


def both_ways(x):
    flat = x.flatten()
    part = flat.unflatten(0, (2, 24))[1]
    part.neg_()
    x.mul_(3)
    part.add_(1)
    return flat


def pieces(x):
    first, second = x.split(4)
    first.add_(second)
    rows = x.unbind(0)
    rows[3].add_(rows[4])
    rows[4].mul_(rows[3])
    uneven = x.split([1, 5, 2])
    uneven[1].mul_(0.5)
    return first


def two_copies(x):
    one, other = x.view(-1), x.view(-1)
    one[3:20].mul_(3)
    return other


def diagonal(x):
    x[:6].diagonal().add_(10)
    return x.as_strided((4,), (7,), 1).mul_(2)


def through_a_transpose(x):
    turned = x.t()
    column = turned[1]
    x.mul_(2)
    column.add_(1)
    return turned


def copies_of_each_other(x):
    halves = x.view(2, 4, 6)
    halves[0].copy_(halves[1])
    return halves


def lists(x):
    row = x[0]
    torch._foreach_add_([row, x[1]], [row * 2, row])
    return row


def after_new_data(x):
    flat = x.view(-1)
    x.data = torch.zeros_like(x)
    flat.add_(1)
    return flat


def without_gradients(x):
    flat = x.detach().view(-1)
    x.add_(1)
    return flat


def parameters_to_vector(x):
    parts = torch.nn.utils.parameters_to_vector([x, x * 2])
    other = torch.zeros_like(x)
    torch.nn.utils.vector_to_parameters(parts, [other, x])
    return other


def out(x):
    rows = x[4:6]
    torch.add(x[:2], x[2:4], out=rows)
    return rows


def complex_numbers(x):
    pairs = torch.view_as_complex(x.unflatten(1, (3, 2)))
    pairs.mul_(2j)
    x.add_(1)
    pairs[1] = 3
    torch.view_as_real(pairs).sub_(x[:, 0].clone().view(8, 1, 1))
    return pairs


def bits(x):
    words = x.view(torch.int64)
    words[0].zero_()
    x[1].add_(1)
    return words


# A view in place is a copy where a dim goes that is sharded, or where sizes count in the memory of the whole.


def column_that_becomes_a_vector(x):
    column, first = x[:, :1], x[3]
    column.squeeze_(1)
    column.add_(1)
    first.mul_(2)
    return column


def row_that_becomes_a_vector(x):
    rows = x[:1]
    entries = rows[:, 2:5]
    rows.squeeze_()
    entries.neg_()
    rows[2] = 5.0
    rows.unsqueeze_(1).t_()
    rows.sub_(1)
    return rows


def reshaped_alias(x):
    flat = torch.ops.aten._reshape_alias(x, [48], [1])
    flat[7:9] = 2.0
    x.add_(1)
    return flat


def a_copy_that_turns_often(x):
    flat = x.view(-1).view(6, 8)
    for _ in range(600):
        flat.t_()
    x.add_(1)
    flat.mul_(2)
    return flat


def a_copy_that_turns(x):
    flat = x.view(-1).view(6, 8)
    flat.t_()
    flat.mul_(2)
    x.add_(1)
    return flat


def other_sizes(x):
    row, y = x[0], x.clone()
    first = y[0]
    x.resize_(2, 7)
    row.add_(1)
    x.mul_(3)
    y.resize_(9, 6)
    y.fill_(2.0)
    return torch.cat([x.view(-1), y.view(-1), row, first])


def sizes_of_another(x):
    row = x[1]
    x.resize_as_(torch.zeros_like(x)[:3])
    x.zero_()
    return row


def other_strides(x):
    row = x[1]
    x.as_strided_((3, 4), (2, 3))
    row.add_(1)
    x.mul_(2)
    return row


PROGRAMS = [
    row,
    rows,
    element_of_a_flat_view,
    windows,
    read_after_a_write_to_the_base,
    view_of_a_view,
    both_ways,
    pieces,
    two_copies,
    diagonal,
    through_a_transpose,
    copies_of_each_other,
    lists,
    after_new_data,
    without_gradients,
    parameters_to_vector,
    out,
    complex_numbers,
    bits,
    column_that_becomes_a_vector,
    row_that_becomes_a_vector,
    a_copy_that_turns,
    a_copy_that_turns_often,
    reshaped_alias,
    other_sizes,
    sizes_of_another,
    other_strides,
]


def runs(program):
    for layout in LAYOUTS:
        whole, x = values(), sw.distribute_tensor(values(), mesh((dist.get_world_size(),)), layout)
        equal(program(x), program(whole))
        equal(x, whole)


def write_a_row_of_windows_that_overlap():
    """What is written to one window belongs to its neighbours, too, which share no memory with the copy."""
    for dim in (0, 1):
        x = sw.distribute_tensor(values(), mesh((2,)), [Shard(dim)])
        windows = x.unfold(1 - dim, 3, 1)
        row = windows.select(dim, 1)
        with pytest.raises(InPlaceError, match=r"one element of the base|share memory"):
            row.select(0, 1).zero_()
        # One device adds as often as there are windows over an element.
        moved = x.unfold(dim, 3, 1)
        with pytest.raises(InPlaceError, match="one element of the base"):
            moved.add_(1)
        with pytest.raises(InPlaceError, match="one element of the base"):
            moved.select(-1, 0).add_(1)
        equal(x, values())


def test_a_row_of_windows_that_overlap_cannot_be_written_where_it_moved(two_ranks):
    two_ranks.run(write_a_row_of_windows_that_overlap)


def write_a_negative_view():
    """It is refused, not lost: its base had to be reduced for it."""
    x = sw.MeshTensor.from_local(values(), mesh((2,)), [Partial("product")])
    with pytest.raises(InPlaceError):
        torch._neg_view(x).add_(1)
    equal(x, values() ** 2)


def test_a_negative_view_of_a_partial_product_cannot_be_written(two_ranks):
    two_ranks.run(write_a_negative_view)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_with_views_gives_what_one_device_gives(two_ranks, program):
    two_ranks.run(runs, program)


# -- gradients -----------------------------------------------------------------------------------------------------


def written_rows(x):
    y = x * 2
    y[0] = 0.0
    y[2:4].mul_(3)
    return (y.view(-1) * torch.arange(48.0)).sum()


def written_flat(x):
    y = x * 1
    flat = y.view(-1)
    flat[3:9].mul_(flat[10:16].clone())
    return (y**2).sum()


def written_windows(x):
    y = x * 1
    y.unfold(0, 4, 4)[1].mul_(3)
    return (y**2).sum()


def written_base(x):
    y = x * 1
    view = y.view(6, 8)
    y.mul_(2)
    return (view**2).sum()


def written_view(x):
    y = x * 1
    view = y.view(6, 8)
    view.mul_(2)
    return (view**2).sum() + (y**3).sum()


def differentiates(program):
    for layout in LAYOUTS:
        whole = values().requires_grad_()
        x = sw.distribute_tensor(values(), mesh((dist.get_world_size(),)), layout).requires_grad_()
        program(x).backward()
        program(whole).backward()
        equal(x.grad, whole.grad)


@pytest.mark.parametrize(
    "program", [written_rows, written_flat, written_windows, written_base, written_view], ids=lambda p: p.__name__
)
def test_gradients_go_through_written_views(two_ranks, program):
    two_ranks.run(differentiates, program)


def stale_for_backward():
    x = sw.distribute_tensor(values(), mesh((2,)), [Shard(1)]).requires_grad_()
    y = x * 1
    view = y.view(-1)
    loss = view.square().sum()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_saved_view_whose_base_was_written_is_an_error_as_in_torch(two_ranks):
    two_ranks.run(stale_for_backward)


# -- cost and life -------------------------------------------------------------------------------------------------


def communicates_when_needed():
    x = sw.distribute_tensor(values(), mesh((2,)), [Shard(1)])
    flat, events = x.view(3, 16), []
    with observe(events.append):
        flat + 1
        assert not events
        x.add_(1)
        assert not events
        flat + 1
        fetched = len(events)
        assert fetched
        flat + 1
        assert len(events) == fetched
    assert view_copies.watched
    del flat
    gc.collect()
    assert not view_copies.watched


def test_a_copy_is_fetched_again_only_after_a_write(two_ranks):
    two_ranks.run(communicates_when_needed)


def steps():
    """An optimizer steps on local tensors; views of its parameters follow."""
    p = torch.nn.Parameter(sw.distribute_tensor(values(), mesh((2,)), [Shard(1)]))
    view = p.detach().view(-1)
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=1.0).step()
    equal(view, (values() - 1).view(-1))


def test_a_view_follows_an_optimizer_step(two_ranks):
    two_ranks.run(steps)
