"""Reductions of unsigned integers, for which torch has no kernels."""

from __future__ import annotations

import math

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.kernel.reductions import REDUCE_OPS, reduce_stacked, reducible
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
