"""Zeros of both signs, infinities and NaN on real ranks, against one device."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import mesh

INFINITY = float("inf")
ZEROS = torch.tensor([-0.0, 0.0, -0.0, 1.0, -0.0, 0.0, -1.0, -0.0])
INDEX = torch.tensor([0, 5, 2, 7, 1])


def same(found, expected):
    """Equal, NaN and the signs of zeros included."""
    found = found.full_tensor()
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in (found, expected)]
    assert torch.equal(parts[0].signbit(), parts[1].signbit()), (found, expected)
    torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=0, equal_nan=True)


def zeros_keep_their_signs(dtype):
    device_mesh = mesh((4,))
    values = torch.complex(ZEROS, ZEROS.flip(0)) if dtype.is_complex else ZEROS.to(dtype)
    replicated = sw.distribute_tensor(values, device_mesh, [Replicate()])
    for placement in (Replicate(), Shard(0)):
        x = sw.distribute_tensor(values, device_mesh, [placement])
        for kind in ("sum", "avg"):
            partial = x.redistribute(placements=[Partial(kind)])
            same(partial, values)
            same(partial.redistribute(placements=[Shard(0)]), values)
            same(partial[:7].redistribute(placements=[Shard(0)]), values[:7])
    for kind in ("sum", "avg"):
        same(sw.distribute_tensor(values, device_mesh, [Partial(kind)]), values)
    x = sw.distribute_tensor(values, device_mesh, [Shard(0)])
    index = sw.distribute_tensor(INDEX, device_mesh, [Replicate()])
    same(x[index], values[INDEX])
    same(x.gather(0, index), values.gather(0, INDEX))
    same(x.index_select(0, index), values.index_select(0, INDEX))
    partial = sw.distribute_tensor(values, device_mesh, [Partial()])
    # Torch's sum of complex numbers multiplies by alpha, also by 1, and that mixes the zeros of their parts.
    additions = (
        ()
        if dtype.is_complex
        else (
            (partial, replicated, values, values),
            (replicated, partial, values, values),
            (partial, -0.0, values, -0.0),
        )
    )
    for one, other, *whole in additions:
        same(torch.add(one, other), torch.add(*whole))
        same(torch.sub(one, other, alpha=-2), torch.sub(*whole, alpha=-2))
    if not dtype.is_complex:
        same(partial - 0, values - 0)
        table = sw.distribute_tensor(values.view(8, 1), device_mesh, [Shard(0)])
        same(F.embedding(index, table), F.embedding(INDEX, values.view(8, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_sums_over_ranks_keep_the_signs_of_zeros(pool, dtype):
    pool.run(zeros_keep_their_signs, dtype)


def scaled_by_infinity():
    device_mesh = mesh((4,))
    values = torch.tensor([1.0, -2.0, 0.0, float("nan"), INFINITY])
    for kind in ("sum", "avg"):
        for factor in (INFINITY, -INFINITY, float("nan"), torch.tensor(INFINITY)):
            same(sw.distribute_tensor(values, device_mesh, [Partial(kind)]) * factor, values * factor)
            written = sw.distribute_tensor(values, device_mesh, [Partial(kind)])
            written *= factor
            same(written, values * factor)


def test_a_partial_sum_times_infinity_is_that_of_one_device(pool):
    pool.run(scaled_by_infinity)
