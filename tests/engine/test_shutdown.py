"""Leaving: nothing of ours holds process groups, and what was let go of is found again."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import groups, redistribute
from shardwise.engine import shutdown as leaving
from shardwise.kernel import dispatcher

PROGRAM = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw
from shardwise import Replicate, Shard

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
sw.ones(4, device_mesh=mesh, placements=[Shard(0)]).redistribute(placements=[Replicate()])
dist.destroy_process_group()
print("left")
"""


def test_what_was_let_go_of_is_found_again():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        x = sw.distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
        x.redistribute(placements=[Replicate()])
        (x + x).sum()
        leaving.let_go()
        assert not groups._groups
        assert not dispatcher._state.handlers
        assert redistribute._runners.cache_info().currsize == 0
        assert x.redistribute(placements=[Replicate()]).shape == (8, 4)
        assert torch.equal((x + x).to_local(), 2 * x.to_local())
    finally:
        dist.destroy_process_group()


def test_a_process_leaves_in_order():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


# Python empties modules in the order in which they came, the last one first: what an older one holds goes later.
LATE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw
from shardwise import Shard

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
plain = torch.ones(4)
x = sw.ones(4, device_mesh=mesh, placements=[Shard(0)])
x + plain  # is known from here on
module = torch.nn.Linear(4, 4)
old = module.weight
sw.distribute_module(module, mesh)
base = sw.ones(2, 4, device_mesh=mesh, placements=[Shard(0)])
copy = base.view(-1)
copy.add_(1)
torch.kept = [plain, old, base, copy]
dist.destroy_process_group()
print("left")
"""


def test_what_lives_longer_than_our_modules_ends_in_silence():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
