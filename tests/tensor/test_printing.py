"""``sw.print``: all ranks compute what is printed, and the first one prints it."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Shard
from shardwise.testing import mesh


def printed():
    text = io.StringIO()
    x = sw.distribute_tensor(torch.arange(4.0), mesh((2,), ("tp",)), [Shard(0)])
    sw.print("sum", x.sum(), f"{x.sum():.2f}", sep="|", file=text)
    sw.print(x, 7, end="", file=text)
    return dist.get_rank(), text.getvalue()


def test_the_first_rank_prints_whole_values(two_ranks):
    by_rank = dict(two_ranks.run(printed))
    assert by_rank == {0: "sum|6.0|6.00\ntensor([0., 1., 2., 3.]) 7", 1: ""}
    text = io.StringIO()
    sw.print("alone", file=text)
    assert text.getvalue() == "alone\n"
