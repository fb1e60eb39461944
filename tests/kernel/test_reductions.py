"""Reductions of unsigned integers, for which torch has no kernels, averages, and products of complex numbers."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from fake_meshes import fake_mesh

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.kernel.reductions import (
    REDUCE_OPS,
    add_up,
    average,
    reduce_pieces,
    reduce_stacked,
    reducible,
    scaled_down,
)
from shardwise.testing import mesh

WIDE = (torch.uint16, torch.uint32, torch.uint64)
EXPECTED = {"sum": sum, "max": max, "min": min, "product": math.prod}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", EXPECTED)
def test_unsigned_integers_wrap_around_and_compare_as_such(dtype, kind):
    top = torch.iinfo(dtype).max
    rows = [[3, top, 0, top // 2 + 1], [5, 7, top, top // 2 - 1], [2, 1, 1, top // 2]]
    expected = [EXPECTED[kind](column) % (top + 1) for column in zip(*rows, strict=True)]
    assert reduce_stacked(torch.tensor(rows, dtype=dtype), kind).tolist() == expected


@pytest.mark.parametrize("dtype", WIDE[:2])
def test_an_average_of_unsigned_integers_is_rounded_towards_zero(dtype):
    top = torch.iinfo(dtype).max
    assert reduce_stacked(torch.tensor([[3, top], [4, top]], dtype=dtype), "avg").tolist() == [3, top]


def test_the_largest_unsigned_integers_have_no_average():
    assert not reducible("avg", torch.uint64)
    with pytest.raises(LayoutError, match="uint64 has no avg"):
        reduce_stacked(torch.tensor([[3], [4]], dtype=torch.uint64), "avg")


def redistributed():
    device_mesh = mesh((2,))
    for dtype in WIDE:
        whole = torch.tensor([0, 1, 5, torch.iinfo(dtype).max], dtype=dtype)
        for kind in REDUCE_OPS:
            if reducible(kind, dtype):
                x = sw.distribute_tensor(whole, device_mesh, [Partial(kind)])
                for placement in (Replicate(), Shard(0)):
                    assert x.redistribute(placements=[placement]).full_tensor().tolist() == whole.tolist()


def test_partial_unsigned_integers_are_redistributed(two_ranks):
    two_ranks.run(redistributed)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def averages(size):
    """On a rank: an average of equal pieces near the largest number of a dtype, whole and scattered, over them."""
    shares = []
    for dtype in (*FLOATS, *INTEGERS):
        for rows in (4, 40000):  # gathered whole, and each rank its share
            largest = (torch.iinfo if dtype in INTEGERS else torch.finfo)(dtype).max
            pieces = sw.MeshTensor.from_local(
                torch.full((rows,), largest, dtype=dtype), mesh((size,)), [Partial("avg")]
            )
            for goal in (Replicate(), Shard(0)):
                local = pieces.redistribute(placements=[goal]).to_local()
                shares.append(bool((local == largest).all()))
    return shares


def test_an_average_does_not_overflow(two_ranks):
    assert two_ranks.run(averages, 2) == [[True] * 4 * (len(FLOATS) + len(INTEGERS))] * 2


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("size", [1, 2, 3, 130])
def test_an_average_of_integers_is_that_of_whole_numbers_rounded_towards_zero(dtype, size):
    limits, chance = torch.iinfo(dtype), random.Random(size)  # noqa: S311  # no secret
    ends = [limits.min, limits.min + 1, 0, 1, limits.max]
    columns = [[end] * size for end in ends] + [[chance.choice(ends) for _ in range(size)] for _ in range(50)]
    columns += [[chance.randint(limits.min, limits.max) for _ in range(size)] for _ in range(50)]
    expected = [int(Fraction(sum(column), size)) for column in columns]
    assert reduce_stacked(torch.tensor(columns, dtype=dtype).T, "avg").tolist() == expected


def whole_as_average(dtype):
    """On a rank: large integers that lie whole, or sharded, redistributed to an average and back."""
    whole = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min, 7, 0], dtype=dtype)
    for placement in (Replicate(), Shard(0)):
        x = sw.distribute_tensor(whole, mesh((2,)), [placement])
        assert x.redistribute(placements=[Partial("avg")]).full_tensor().tolist() == whole.tolist()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_large_integers_go_to_an_average_and_back(two_ranks, dtype):
    two_ranks.run(whole_as_average, dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64])
def test_what_has_no_average_does_not_become_one(dtype):
    with fake_mesh(2) as m, pytest.raises(LayoutError, match="cannot be reduced by avg"):
        sw.distribute_tensor(torch.ones(4).to(dtype), m).redistribute(placements=[Partial("avg")])


@pytest.mark.parametrize("size", [3, 4, 5])
def test_an_average_of_equal_pieces_is_each_of_them(size):
    values = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stacked = values.expand(size, 100)
    torch.testing.assert_close(reduce_stacked(stacked, "avg"), values, rtol=1e-15, atol=0)
    assert torch.equal(average(add_up(scaled_down(stacked, size)), size), add_up(stacked) / size)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "value",
    [complex("-inf+nanj"), complex("inf+0j"), complex(-0.0, 2.0), complex(3.0, -0.0), complex(0.5, -4.0)],
    ids=str,
)
def test_one_changes_nothing_in_a_product_of_complex_numbers(value, place):
    pieces = [torch.ones(2, dtype=torch.complex64) for _ in range(3)]
    pieces[place] = torch.full((2,), value, dtype=torch.complex64)
    product = torch.view_as_real(reduce_pieces(pieces, "product"))
    expected = torch.view_as_real(pieces[place])
    assert torch.equal(product.signbit(), expected.signbit()) or expected.isnan().any()
    torch.testing.assert_close(product, expected, rtol=0, atol=0, equal_nan=True)


def test_a_product_of_complex_numbers_is_their_product():
    pieces = [torch.randn(5, dtype=torch.complex128) for _ in range(4)]
    torch.testing.assert_close(reduce_pieces(pieces, "product"), torch.stack(pieces).prod(0))
