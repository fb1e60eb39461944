"""Collectives that go together: what becomes of the others where one of them is waited for."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from shardwise.comm.async_result import AsyncResult
from shardwise.comm.coalescing import coalesced
from shardwise.comm.collective_log import CollectiveLog


class Group:
    """A group of one rank, whose collectives are over at once; the collector runs in the wait for them."""

    def __init__(self) -> None:
        self.log = CollectiveLog()

    def issue_coalesced(self, *_: Any) -> Any:
        return self

    def emit_issued(self, *_: Any) -> Any:
        raise AssertionError("nobody observes")

    def wait(self) -> None:
        gc.collect()


def test_a_result_may_end_while_another_of_its_batch_is_waited_for():
    """The end of a result waits, and the collector, which may run anywhere, can be what ends it."""
    group = Group()
    with coalesced() as batch:
        kept, left = (
            AsyncResult(batch.add(group, "all_gather", out, out), out) for out in (torch.ones(2), torch.ones(2))
        )
    ends: list[Any] = [left]
    ends.append(ends)  # which only the collector finds
    del left, ends
    thread = threading.Thread(target=kept.wait, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for a lock that it holds"
