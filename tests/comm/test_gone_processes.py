"""A rank whose process ends without a word: the others end soon, with an error that names it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.comm.failure_notes import GONE, World
from shardwise.comm.gone_processes import _place, absent_rank, gone_rank, learn_processes, tell_process
from shardwise.comm.processes import Process
from shardwise.comm.shared_store import SharedStore


@contextmanager
def child() -> Iterator[int]:
    """A process that does nothing, and is not waited for until the end."""
    number = os.fork()
    if number == 0:
        signal.pause()
    try:
        yield number
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def kill(number: int) -> None:
    os.kill(number, signal.SIGKILL)
    end = time.monotonic() + 10
    while Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")


@needs_proc
def test_a_process_is_gone_when_it_has_ended_even_if_nobody_has_waited_for_it() -> None:
    assert not Process.of(os.getpid()).is_gone()
    with child() as number:
        process = Process.of(number)
        assert not process.is_gone()
        kill(number)
        assert process.is_gone(), "its number is still taken"
        os.waitpid(number, 0)
        assert process.is_gone()


@needs_proc
def test_a_number_that_another_process_has_now_does_not_hide_that_one_is_gone() -> None:
    with child() as number:
        assert Process(number, Process.of(number).began + "0").is_gone()


def world_of(store: dist.Store, rank: int) -> World:
    return World(SharedStore(store, 3), rank, 3, "test", lambda: None)


@needs_proc
def test_the_rank_of_a_process_that_is_gone_is_named() -> None:
    store = dist.HashStore()
    first, second = world_of(store, 0), world_of(store, 1)
    tell_process(first)
    assert gone_rank(second, range(3)) is None
    with child() as number:
        process = Process.of(number)
        store.append("test/processes", f'[2, "{_place()}", {number}, "{process.began}"]\n')
        assert gone_rank(second, range(3)) is None
        learn_processes(first)
        assert set(first.processes) == {2}, "a rank does not look at itself"
        kill(number)
        note = gone_rank(second, range(3))
    assert note is not None
    assert (note.rank, note.kind, note.is_final) == (2, GONE, True)
    error = note.error("closed")
    assert f"rank 2 has failed: its process, {number}, has ended without a word" in str(error)
    assert error.rank == 2
    assert gone_rank(second, [0]) is None, "only those that were asked for"


def test_ranks_that_never_came_are_named_and_those_of_other_hosts_that_came_are_not() -> None:
    store = dist.HashStore()
    world = World(SharedStore(store, 4), 1, 4, "test", lambda: None)
    assert absent_rank(world, range(4), 0) is None, "nobody has written"
    tell_process(world)
    store.append("test/processes", '[0, "another host", 1, ""]\n')
    note = absent_rank(world, range(4), 0)
    assert note is not None
    assert (note.rank, note.kind, note.is_final) == (2, GONE, True)
    assert "rank 2 has failed: it has not come to its first call of shardwise, and" in str(note.error(""))
    assert "it may also be rank 3, for the same reason" in str(note.error(""))
    assert world.processes == {}, "those of another host are not looked for here"
    tell_process(world_of(store, 2))
    assert "also" not in str(absent_rank(world, [0, 1, 3]))
    assert absent_rank(world, range(3)) is None


# -- processes that end ------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, torch
from datetime import timedelta
import torch.distributed as dist
rank, port, failing = map(int, sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(minutes=10))
import shardwise as sw
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (3,))
if sys.argv[4] != "early":
    x = sw.MeshTensor.from_local(torch.ones(2), mesh, [sw.Shard(0)])
    x.sum().full_tensor()
print("began", flush=True)
sys.stdin.readline()
if rank == failing:
    os._exit(7) if sys.argv[4] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "layout":  # the ranks meet in the store
    sw.MeshTensor.from_local(torch.ones(5, 5), mesh, [sw.Shard(0)])
elif sys.argv[4] == "torch":
    dist.barrier()
elif sys.argv[4] == "early":
    sw.distribute_tensor(torch.ones(6), mesh, [sw.Shard(0)]).sum().full_tensor()
else:
    x.sum().full_tensor()
"""


@needs_proc
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(
    ("how", "failing"), [("collective", 1), ("layout", 0), ("layout", 1), ("torch", 1), ("exit", 0), ("early", 1)]
)
def test_a_process_that_is_killed_ends_the_others_by_name(how: str, failing: int) -> None:
    """Rank 0 has the store, which ends with it. One that is killed early has not said which process it is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(failing), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "began\n"
        time.sleep(1)  # a run that lasts
        start = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=60)[1] for process in processes]  # the backend's own limit is longer
        seconds = time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(f"{seconds:.1f} s until all ranks had ended")
    said = f"its process, {processes[failing].pid}, has ended without a word"
    if how == "early":
        said = "it has not come to its first call of shardwise, and a connection between ranks was closed. "
    for rank in {0, 1, 2} - {failing}:
        assert f"rank {failing} has failed: {said}" in errors[rank], errors
