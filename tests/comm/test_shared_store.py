"""The store of the notes of ranks, which ends with the process that has it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from shardwise.comm import shared_store
from shardwise.comm.processes import Process
from shardwise.comm.shared_store import SharedStore, StoreGoneError

STACK = "frame #0"


def hold(end: Connection) -> None:
    """Have a store until the process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end.send(store.port)
    end.recv()


@pytest.fixture
def held() -> Iterator[tuple[dist.TCPStore, int]]:
    """A store that another process has, and the number of that process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    yield dist.TCPStore("127.0.0.1", ours.recv(), is_master=False), process.pid or 0
    process.kill()
    process.join()


def test_a_store_that_is_gone_is_not_called(held: tuple[dist.TCPStore, int], capfd: pytest.CaptureFixture[str]) -> None:
    store = SharedStore(held[0], 2)
    store.holder = Process.of(held[1])
    store.set("key", "value")
    store.append("key", "s")
    store.compare_set("other", "", "1")
    assert (store.get("key"), store.add("count", 2), store.add("count", 1)) == (b"values", 2, 3)
    assert store.check(["key", "other"])
    store.delete_key("other")
    assert not store.check(["key", "other"])
    assert not store.is_gone()
    os.kill(held[1], signal.SIGKILL)
    end = time.monotonic() + 60  # the process has yet to get the signal
    while not store.is_gone() and time.monotonic() < end:
        time.sleep(0.01)
    assert store.is_gone()
    for call in (lambda: store.check(["key"]), lambda: store.add("count", 1), lambda: store.set("key", "")):
        with pytest.raises(StoreGoneError, match="connection to the store has ended"):
            call()
    assert STACK not in capfd.readouterr().err


def test_without_a_connection_of_its_own_one_call_fails_and_no_more(
    held: tuple[dist.TCPStore, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """With very many ranks there is none."""
    store = SharedStore(held[0], 100_000)
    store.set("key", "value")
    os.kill(held[1], signal.SIGKILL)
    os.waitid(os.P_PID, held[1], os.WEXITED | os.WNOWAIT)
    with pytest.raises(dist.DistNetworkError):
        store.get("key")
    for _ in range(3):
        with pytest.raises(StoreGoneError):
            store.get("key")
    assert capfd.readouterr().err.count(STACK) == 1


class Ending:
    """A process that ends for some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_ending(self) -> bool:
        self.looks -= 1
        return self.looks >= 0


def test_a_call_waits_for_the_first_rank_that_is_ending_and_then_knows_whether_it_had_the_store(
    held: tuple[dist.TCPStore, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedStore(held[0], 2)
    monkeypatch.setattr(store, "holder", ending := Ending(3))
    store.set("key", "value")
    assert ending.looks < 0, "it has ended, and the store is another process's"
    monkeypatch.setattr(shared_store, "_END", 0.05)
    monkeypatch.setattr(store, "holder", Ending(10**9))
    assert store.get("key") == b"value"
    assert store.holder is None, "nobody waits for it again"


def test_a_process_is_ending_before_it_has_ended() -> None:
    assert not Process.of(os.getpid()).is_ending()
    number = os.fork()
    if number == 0:
        os._exit(0)
    process = Process.of(number)
    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)
    assert process.is_ending() == os.path.exists("/proc/self/stat"), "its parent has not read how it ended"  # noqa: PTH110
    os.waitpid(number, 0)
    assert not process.is_ending()


def test_a_store_in_memory_is_never_gone() -> None:
    store = SharedStore(dist.HashStore(), 2)
    store.holder = Process.of(os.getpid())
    store.set("key", "value")
    assert not store.is_gone()
