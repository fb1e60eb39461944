"""Meetings that a program has not asked for: who is late is waited for, and who cannot come is not."""

import time

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm.free_meeting import meet
from shardwise.testing import mesh


def meeting(own):
    """What comes of a meeting of all ranks, to which this one goes after something of its own. They have met before."""
    ranks = range(dist.get_world_size())
    meet("the first time", ranks)
    own(dist.get_rank())
    return meet("the same", ranks)


def nothing(_):
    """Come at once."""


def behind_a_late_rank(rank):
    """Ranks send over the inner mesh dim first, and one is late: another one waits for it, and for nobody else."""
    x = sw.ones((4,), device_mesh=mesh((2, 2)), placements=[Replicate(), Shard(0)])
    if rank == 3:
        time.sleep(8)
    x.redistribute(placements=[Replicate(), Replicate()])


def test_ranks_that_say_the_same_or_not(two_ranks):
    assert two_ranks.run(meeting, nothing) == [True, True]
    assert two_ranks.run(lambda: meet(str(dist.get_rank()), (0, 1))) == [False, False]


@pytest.mark.slow
@pytest.mark.sample
def test_a_rank_that_waits_for_a_late_one_is_waited_for(pool):
    assert pool.run(meeting, behind_a_late_rank, timeout=60) == [True] * 4
