"""A rank whose process gloo ends, because a message is longer than expected, says what the ranks did differently."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.comm import native_end
from shardwise.comm.failure_notes import GONE, PROCESS, Note, World
from shardwise.comm.shared_store import SharedStore
from shardwise.errors import RankDisagreementError
from shardwise.private_torch.native_ends import at_native_end, leave_native_ends

PROGRAM = """
import sys, torch
from datetime import timedelta
import torch.distributed as dist
rank, port = map(int, sys.argv[1:3])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
import shardwise as sw
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2,))
x = sw.distribute_tensor(torch.ones(2, 512), mesh, [sw.Shard(0)])
if rank == 0:
    x.sum().full_tensor()
x.sum(0).full_tensor()
"""


@pytest.mark.slow
@pytest.mark.sample
def test_a_message_that_is_too_long_is_a_disagreement_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(file), str(rank), str(port)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 1, error
        assert "RankDisagreementError: run the same collectives on every rank" in error, error
        for rank, size in enumerate((4, 2048)):
            says = f"rank {rank}: all_reduce sum over mesh dim 0 of {size:d} bytes, MeshTensor.full_tensor at "
            assert says in error, error
        assert f'File "{file}", line 1' in error, "the line where the rank was"


# -- the parts ---------------------------------------------------------------------------------------------------------


def ends(child: Callable[[], None]) -> tuple[int, str]:
    """How a fork of this process ends in which C++ finds no handler for an exception, and what it writes."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        faulthandler.disable()
        child()
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), text


def say(text: str) -> None:
    os.write(1, text.encode())


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the library of C++ has another name")


@needs_linux
def test_a_function_runs_before_native_code_ends_the_process_as_it_would_have() -> None:
    code, text = ends(lambda: at_native_end(lambda: say("called. ")) and None)
    assert (code, text.startswith("called. ")) == (-6, True)
    assert "terminate called" in text


@needs_linux
def test_what_was_in_force_before_is_in_force_again() -> None:
    def child() -> None:
        assert at_native_end(lambda: say("called. "))
        leave_native_ends()

    code, text = ends(child)
    assert code == -6
    assert "called. " not in text


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """That of this process, which is rank 1 of two."""
    here = World(SharedStore(dist.HashStore(), 2), 1, 2, "test", lambda: None)
    monkeypatch.setattr(native_end, "current_world", lambda: here)
    monkeypatch.setattr(native_end, "_LOOKS", 0.2)
    return here


def test_without_a_difference_the_others_are_told_and_the_process_ends_as_it_would_have(world: World) -> None:
    native_end.end_with_reason()
    assert world.own is not None
    assert (world.own.kind, world.own.is_final) == (GONE, True)
    assert "native code has ended its process" in str(world.own.error(""))
    other = World(world.store, 0, 2, "test", lambda: None)
    assert other.read([1]) == {1: world.own}


def test_a_difference_is_written_as_an_error_that_nobody_catches(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(native_end.os, "_exit", codes.append)
    says = ("rank 0: this", "rank 1: that")
    world.failure = Note(1, "run", RankDisagreementError.__name__, "they differ", "", 1, is_final=True, ranks_say=says)
    native_end.end_with_reason()
    assert codes == [1]
    text = capfd.readouterr().err
    assert "RankDisagreementError: run: they differ: rank 0: this; rank 1: that." in text
    assert "test_a_difference_is_written_as_an_error" in text, "where the main thread is"
    assert world.own == world.failure


def test_a_process_that_ends_anyway_has_nothing_to_say(world: World) -> None:
    PROCESS.is_ending.set()
    try:
        native_end.end_with_reason()
    finally:
        PROCESS.is_ending.clear()
    assert world.own is None
