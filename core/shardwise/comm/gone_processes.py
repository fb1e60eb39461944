"""Ranks whose process has ended without a word: killed, out of memory, crashed, or left by ``os._exit``.

Such a rank writes no note. What is left of it are closed connections, and a backend names the neighbour's address by
them, if anything. So the ranks of a host write which processes they are. A rank that waits, or whose collective has
failed, looks whether those still run. Of a process on another host nothing is known here but that it once came.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

from shardwise.comm.failure_notes import GONE, Note, World
from shardwise.comm.processes import Process

__all__ = ["absent_rank", "gone_rank", "learn_processes", "tell_process"]

_COMING = 5.0  # seconds in which a rank that runs comes to its first call, as the other ranks do


@cache
def _place() -> str:
    """Where the number of a process counts: a host, since its last start, and a name space of processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _key(world: World) -> str:
    return f"{world.prefix}/processes"


def tell_process(world: World) -> None:
    """Write which process this rank is."""
    process = Process.of(os.getpid())
    line = json.dumps([world.rank, _place(), process.number, process.began])
    with suppress(RuntimeError, NotImplementedError):
        world.store.append(_key(world), f"{line}\n")


def learn_processes(world: World) -> bool:
    """Read which processes the other ranks are; whether the store has said so."""
    with suppress(RuntimeError, NotImplementedError):
        if world.store.check([_key(world)]):
            lines = [json.loads(line) for line in world.store.get(_key(world)).decode().splitlines()]
            world.joined = frozenset(rank for rank, *_ in lines)
            world.processes = {
                rank: Process(number, began)
                for rank, place, number, began in lines
                if place == _place() and rank != world.rank
            }
            world.store.holder = world.processes.get(0)
            return True
    return False


def gone_rank(world: World, ranks: Collection[int]) -> Note | None:
    """A note about the first of some ranks whose process is known to have ended; None where no rank's is.

    It is the rank's own if it has written one, as it may have done since others last read.
    """
    learn_processes(world)
    for rank, process in sorted(world.processes.items()):
        if rank in ranks and process.is_gone():
            if rank in (said := world.read([rank])):
                return said[rank]
            text = f"its process, {process.number}, has ended without a word"
            return Note(rank, "", GONE, text, GONE, 1, is_final=True)
    return None


def absent_rank(world: World, ranks: Collection[int], seconds: float = _COMING) -> Note | None:
    """A final note about the rank that has not come to a call of shardwise; None where all of some ranks have.

    Such a rank has not said which process it is. It may be on its way, so this explains nothing but a lost connection,
    and while several are absent they have some seconds to come.
    """
    end = time.monotonic() + seconds
    while True:
        absent = sorted(set(ranks) - world.joined - {world.rank}) if learn_processes(world) else []
        if not absent[1:] or time.monotonic() >= end:
            break
        time.sleep(_COMING / 100)
    if not absent:
        return None
    text = "it has not come to its first call of shardwise, and a connection between ranks was closed"
    if absent[1:]:
        text = f"{text}; it may also be rank {' or '.join(map(str, absent[1:]))}, for the same reason"
    return Note(absent[0], "", GONE, text, GONE, 1, is_final=True)
