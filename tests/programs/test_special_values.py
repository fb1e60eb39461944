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


def products_of_matrices(x, by):
    """The same for products of matrices and vectors; some columns of ``by`` have infinities, of which some meet 0."""
    total, vector = x.sum(0), by[:, 0]
    yield total @ by
    yield by.t() @ total.t()
    yield torch.bmm(torch.stack([total] * 2), torch.stack([by] * 2))
    yield x.mean(0) @ by
    yield total @ vector
    yield torch.dot(total[0], vector)
    yield torch.addmm(x.sum(0) @ torch.ones_like(by), total, by)
    yield torch.addmm(by[0], total, by, beta=3.0)
    yield torch.addmv(total[:, 0], total, vector)
    yield torch.baddbmm(by[:1, None], torch.stack([total] * 2), torch.stack([by] * 2))
    yield torch.addr(by[:, :3], total[0], vector[:3])
    yield torch.einsum("ij,jk->ik", total, by)
    yield F.linear(total, by.t(), by[0])
    yield (total @ torch.ones_like(by)).addmm_(total, by)


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


def matrices_by_infinite_factors():
    torch.manual_seed(0)
    values, by = torch.randint(-4, 5, (8, 8, 6)).float(), torch.randint(1, 5, (6, 5)).float()
    values[:, 0] = 0
    by[2, 3], by[1, 1], by[4, 0] = -INFINITY, INFINITY, INFINITY
    for shape, rows in (((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Shard(0), Replicate()])):
        device_mesh = mesh(shape)
        for inference in (False, True):
            with torch.inference_mode(inference), sw.check_ranks():
                x = sw.distribute_tensor(values, device_mesh, rows)
                factor = sw.distribute_tensor(by, device_mesh, [Replicate()] * len(shape))
                ours = products_of_matrices(x, factor)
                for product, single in zip(ours, products_of_matrices(values, by), strict=True):
                    alike(product, single)


def test_a_product_of_matrices_with_infinite_elements_is_that_of_one_device(pool):
    pool.run(matrices_by_infinite_factors)


def gradients_by_infinite_weights():
    """The gradient of a layer whose weight is infinite in a place, from a partial gradient."""
    torch.manual_seed(0)
    device_mesh = mesh((4,))
    x, last = torch.randint(-3, 4, (4, 6)).float(), torch.randint(-3, 4, (8, 5)).float()
    weight = torch.randint(1, 4, (6, 8)).float()
    weight[2, 3] = -INFINITY
    direction = torch.randint(1, 4, (4, 5)).float()

    def gradient(x, weight, last, direction):
        x.requires_grad_()
        return torch.autograd.grad(x @ weight, x, direction @ last.t())[0]

    single = gradient(x.clone(), weight, last, direction)
    ours = gradient(
        sw.distribute_tensor(x, device_mesh),
        sw.distribute_tensor(weight, device_mesh),
        sw.distribute_tensor(last, device_mesh, [Shard(1)]),
        sw.distribute_tensor(direction, device_mesh, [Shard(1)]),
    )
    assert single.isinf().any()
    alike(ours, single)


def test_a_gradient_by_an_infinite_weight_is_that_of_one_device(pool):
    pool.run(gradients_by_infinite_weights)


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
