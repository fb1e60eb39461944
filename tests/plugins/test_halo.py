"""Convolution and pooling over sharded positions: only edges move, and the numbers are those of one device."""

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm.events import observe
from shardwise.testing import mesh
from shardwise_conv.halo import Run, reached

R = Replicate()


def made(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def test_runs_share_positions():
    assert Run(0, 4).shared(Run(2, 9)) == Run(2, 4)
    assert len(Run(0, 4).shared(Run(6, 9))) == 0
    assert len(Run(5, 5)) == 0


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(-1, 3, (Run(0, 3), 1, 0)), (6, 9, (Run(6, 8), 0, 1)), (-3, -1, (Run(0, 0), 2, 0)), (9, 12, (Run(8, 8), 0, 3))],
)
def test_what_is_reached_beyond_the_input_is_filled_up(first, last, expected):
    windows = reached(first, last, 8)
    assert (windows.inside, windows.before, windows.after) == expected


# -- on real ranks -----------------------------------------------------------------------------------------------


def compared(call, tensors, shape, placements):
    """Compare the result and the gradients with one device; give placements of the first three and bytes moved."""
    whole = [t.clone().requires_grad_() for t in tensors]
    expected = call(*whole)
    expected.sum().backward()
    layouts = [placements, *[[R] * len(shape)] * (len(tensors) - 1)]
    put = [sw.distribute_tensor(t, mesh(shape), p).requires_grad_() for t, p in zip(tensors, layouts, strict=True)]
    events = []
    with observe(events.append):
        result = call(*put)
        result.sum().backward()
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(put, whole, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)
    assert put[0].grad.placements == tuple(placements)
    return result.placements, [event.nbytes for event in events]


def padded(x, weight, bias):
    return functional.conv2d(x, weight, bias, padding=1)


def strided(x, weight, bias):
    return functional.conv2d(x, weight, bias, stride=(3, 2), padding=(2, 1), dilation=(2, 1))


def turned(x, weight, bias):
    return functional.conv_transpose2d(x, weight.transpose(0, 1), bias, stride=2, padding=1, output_padding=1)


LAYOUTS = [
    ((4,), [Shard(2)]),
    ((2, 2), [Shard(2), Shard(3)]),
    ((2, 2), [Shard(2), Shard(2)]),
    ((2, 2), [Shard(0), Shard(3)]),
]


@pytest.mark.parametrize("call", [padded, strided, turned])
def test_a_convolution_of_sharded_positions(pool, call):
    for shape, placements in LAYOUTS:
        result, _ = pool.run(compared, call, [made(2, 3, 9, 6), made(4, 3, 3, 3), made(4)], shape, placements)[0]
        assert result == tuple(placements)


def test_a_convolution_moves_edges_only(pool):
    """A row to each neighbour, of a picture of 64 rows; then the small gradients of weight and bias are added up."""
    picture = made(1, 2, 64, 16)
    for _, moved in pool.run(compared, padded, [picture, made(2, 2, 3, 3), made(2)], (4,), [Shard(2)]):
        row = 2 * 16 * 4
        # Forward, backward (which fetches again, and gives back), gradients.
        exchanged, gradients = moved[:3], moved[3:]
        assert max(exchanged) <= 2 * row
        assert sorted(gradients) == [2 * 4, 2 * 2 * 9 * 4]


def test_the_gradient_of_a_weight_is_partial(pool):
    assert set(pool.run(gradient_of_weight)) == {(Partial("sum"),)}


def gradient_of_weight():
    x = sw.distribute_tensor(made(2, 3, 9, 6), mesh((4,)), [Shard(2)])
    gradient = sw.distribute_tensor(made(2, 4, 9, 6), mesh((4,)), [Shard(2)])
    weight = sw.distribute_tensor(made(4, 3, 3, 3), mesh((4,)), [R])
    args = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    return torch.ops.aten.convolution_backward(gradient, x, weight, *args)[1].placements


def largest(x):
    return functional.max_pool2d(x, 3, stride=2, padding=1)


def averaged(x):
    return functional.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)


def cubes(x):
    return functional.avg_pool3d(functional.max_pool3d(x.unsqueeze(1), 2, stride=1), (1, 2, 2))


@pytest.mark.parametrize("call", [largest, averaged, cubes])
def test_pooling_of_sharded_positions(pool, call):
    for shape, placements in LAYOUTS:
        pool.run(compared, call, [made(2, 3, 9, 7)], shape, placements)
