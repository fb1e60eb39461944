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


FACTORS = torch.tensor([INFINITY, -INFINITY, 2.0, float("nan"), 0.0, INFINITY])


def products(x, by):
    """Products of a sum, which is partial where rows of ``x`` are sharded, by factors of which some are infinite."""
    total = x.sum(0)
    yield total * by
    yield by * total
    yield x.mean(0) * by.double()
    yield by[0] * total
    yield torch.stack([total] * 6) * by[:, None]
    yield total.clone().mul_(by)
    yield torch.mul(total, by, out=torch.empty_like(total))
    yield torch.addcmul(x.sum(0), total, by, value=-2.0)
    yield x.sum(0).addcmul_(by, total)
    yield torch.lerp(total, x.sum(0) * 3, by)
    yield torch.lerp(total, x.sum(0) * 3, INFINITY)
    yield torch.ldexp(total, by.nan_to_num(posinf=2000.0, neginf=-2000.0))
    yield from torch._foreach_mul([total, total * 2], [by, by])


def alike(found, expected):
    """Equal, NaN included. A product of parts with zero or a negative number may be a zero of either sign."""
    torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0, equal_nan=True)


def multiplied_by_infinite_factors():
    torch.manual_seed(0)
    values = torch.randint(-4, 5, (8, 6)).float()
    values[:, 5] = 0
    for shape, rows in (((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(0), Replicate()])):
        device_mesh = mesh(shape)
        x = sw.distribute_tensor(values, device_mesh, rows)
        by = sw.distribute_tensor(FACTORS, device_mesh, [Replicate()] * len(shape))
        for ours, single in zip(products(x, by), products(values, FACTORS), strict=True):
            alike(ours, single)


def test_a_partial_sum_times_infinite_elements_is_that_of_one_device(pool):
    pool.run(multiplied_by_infinite_factors)


def infinite_on_some_ranks():
    """Factors of which one half of the mesh has infinite ones: that half alone reduces, and no rank minds."""
    torch.manual_seed(0)
    values, by = torch.randint(-4, 5, (8, 4, 6)).float(), torch.ones(4, 6)
    by[0, 0] = INFINITY
    device_mesh = mesh((2, 2))
    with sw.check_ranks():
        x = sw.distribute_tensor(values, device_mesh, [Shard(1), Shard(0)])
        ours = x.sum(0) * sw.distribute_tensor(by, device_mesh, [Shard(0), Replicate()])
        assert ours.placements == (Shard(0), Partial("sum"))
        alike(ours, values.sum(0) * by)


def test_ranks_whose_factors_are_finite_reduce_nothing(pool):
    pool.run(infinite_on_some_ranks)


def sums_over_different_mesh_dims():
    """Two sums, partial over one half of the mesh each, of which parts are infinite on some ranks."""
    torch.manual_seed(0)
    device_mesh = mesh((2, 2))
    for seed in range(40):
        torch.manual_seed(seed)
        plain = [torch.randint(-2, 3, (4, 6)).float() for _ in range(2)]
        for x in plain:
            x.masked_fill_(torch.rand(4, 6) < 0.1, INFINITY)
            x.masked_fill_(torch.rand(4, 6) < 0.1, -INFINITY)
        rows, columns = (
            sw.distribute_tensor(x, device_mesh, placements)
            for x, placements in zip(plain, ([Shard(0), Replicate()], [Replicate(), Shard(0)]), strict=True)
        )
        single = [x.sum(0) for x in plain]
        with sw.check_ranks():
            one, other = rows.sum(0), columns.sum(0)
            assert (one.placements, other.placements) == ((Partial("sum"), Replicate()), (Replicate(), Partial("sum")))
            alike(one * other, single[0] * single[1])
            alike(other * one, single[0] * single[1])
            both = torch.addcmul(one * 2 + other, one, other, value=-1.0)
            alike(both, torch.addcmul(single[0] * 2 + single[1], *single, value=-1.0))


def test_a_product_of_sums_over_different_mesh_dims_is_that_of_one_device(pool):
    pool.run(sums_over_different_mesh_dims)
