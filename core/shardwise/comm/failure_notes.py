"""The notes that ranks leave for each other in the store of the default process group, when one of them fails.

:mod:`shardwise.comm.rank_failures` says who writes them, :mod:`shardwise.comm.waiting_ranks` who reads them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from attrs import asdict, define, evolve, field, frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.collective_log import CollectiveLog
from shardwise.comm.shared_store import SharedStore
from shardwise.errors import RankDisagreementError, RankFailedError, RankWaitError, ShardingError
from shardwise.private_torch.modes import outside_modes

__all__ = [
    "ENDED",
    "GONE",
    "LEFT",
    "PROCESS",
    "TICK",
    "Note",
    "Wait",
    "World",
    "current_world",
    "ranks_of",
    "ranks_on",
    "same_calls",
]

ENDED = "its program has ended"
"""The kind of the note of a rank that has come to the end of its program."""

LEFT = "it has destroyed its process groups"
"""The kind of the note of a rank whose program has done so, and goes on or ends without them."""

GONE = "ended without a word"
"""The kind of a note about a rank whose process is no more and has left no note itself."""

TICK = 0.25
"""Seconds between two looks at what other ranks have left."""

_LINGER = 3.0  # seconds for which the first rank lets the others read why it failed
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two looks at a key


def _texts(value: Sequence[str]) -> tuple[str, ...]:
    """A converter for attrs: a list that came from the store is equal to the tuple that went there."""
    return tuple(value)


@frozen
class Note:
    """What a rank has left in the store: the rank that failed (itself, or the one that it waited for) and its error.

    ``times`` counts the errors with this ``key`` on that rank. ``is_final`` says that the rank will not go on. Where
    ranks have parted or wait too long, ``ranks_say`` has a line for each of them, and no rank is the one that failed.
    """

    rank: int
    op: str
    kind: str
    message: str
    key: str
    times: int
    is_final: bool
    ranks_say: tuple[str, ...] = field(default=(), converter=_texts)

    @property
    def is_end(self) -> bool:
        """Whether the rank has not failed, but issues nothing more: its program has ended, or left its groups."""
        return self.kind in (ENDED, LEFT)

    def error(self, cause: str) -> ShardingError:
        if self.ranks_say:
            return (RankWaitError if self.kind == RankWaitError.__name__ else RankDisagreementError)(
                asked=self.op,
                found=f"{self.message}: {'; '.join(self.ranks_say)}",
                do=f"{same_calls()} This run's process groups are closed: correct the program and start it again.",
                differences=self.ranks_say,
                cause=cause,
            )
        where = f" in {self.op}" if self.op else ""
        message = f"{self.kind}: {self.message}" if self.message else self.kind
        correct = f"Correct what rank {self.rank} says."
        if self.is_end and not self.message:
            correct = f"Correct which calls rank {self.rank} makes before that. {same_calls()}"
        if self.kind == GONE:
            message = self.message
            correct = (
                f"Look in the output of rank {self.rank} and in the log of its system: it crashed, was killed, or came "
                "to the end of its program."
            )
        return RankFailedError(
            asked="wait for the other ranks in a collective",
            found=f"rank {self.rank} has failed{where}: {message}",
            do=f"{correct} This run's process groups are closed: end the program, or destroy them and start "
            "torch.distributed again.",
            rank=self.rank,
            error=message,
            op=self.op,
            cause=cause,
        )


def same_calls() -> str:
    """What to do where ranks have parted."""
    text = (
        "Make each call that communicates on every rank of its mesh, in the same order: item(), full_tensor() and "
        "tolist() are such calls too."
    )
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return text
    return (
        f"{text} A loop over a set of texts has an order of its own on each rank, unless all start with the same "
        "PYTHONHASHSEED."
    )


def _ranks(value: Sequence[int]) -> tuple[int, ...]:
    """A converter for attrs, as :func:`_texts`."""
    return tuple(value)


@frozen
class Wait:
    """What a thread waits for: a collective of shardwise, a comparison before one, or a call of torch.distributed.

    ``group`` is the name of its process group. ``number`` is its number in the log of that group, for a call of torch
    its number among all calls over that group. ``text`` says what it is.
    """

    kind: str
    group: str
    number: int
    ranks: tuple[int, ...] = field(converter=_ranks)
    text: str


@define(eq=False)
class World:
    """What one rank tells and knows of failures, for one default process group."""

    store: SharedStore
    rank: int
    size: int
    prefix: str
    default_group: Any  # a weak reference
    process_groups: WeakSet[Any] = field(factory=WeakSet)
    groups: WeakSet[Any] = field(factory=WeakSet)  # of shardwise.comm.group.Group
    raised: Counter[str] = field(factory=Counter)
    own: Note | None = None
    question: Note | None = None  # left if this rank is held up in a comparison
    lowering_of: tuple[int, ...] = ()  # the ranks of the mesh in whose lowering the error of the note was raised
    failure: Note | None = None
    asked: Counter[str] = field(factory=Counter)  # by ranks, how often they have compared something
    # By process group, what this rank has issued; how often all of it was forgotten, on every rank.
    logs: dict[str, CollectiveLog] = field(factory=dict)
    epoch: int = 0
    steps: int = 0  # of optimizers
    meshes: dict[DeviceMesh, frozenset[int]] = field(factory=dict)  # of parameters that optimizers step: their ranks
    compared_steps: int = 0  # of these, how many there were at the last comparison
    # By thread, what it compares before a collective is issued.
    compares: dict[int, Wait] = field(factory=dict)
    compared: dict[str, str] = field(factory=dict)  # by log, the digest of what was compared last
    compared_at: dict[str, int] = field(factory=dict)  # by log, the number of the collective that was compared last
    # By thread, the frame that it waits in, since when, and what it is; by rank, its note and since when it stands.
    waits: dict[Any, tuple[Any, float, Wait | None]] = field(factory=dict)
    notes: dict[int, tuple[Note, float]] = field(factory=dict)
    processes: dict[int, Any] = field(factory=dict)  # of the other ranks of this host: see gone_processes
    joined: frozenset[int] = frozenset()  # the ranks, of all hosts, that have said which process they are
    looks: int = 0  # of the thread that looks for failures
    compiles: dict[int, Any] = field(factory=dict)  # by thread that has been told to stop, the frame of its compiler
    final: dict[int, Note] = field(factory=dict)  # by the rank that wrote it: the store may end with a rank's process

    def write(self, note: Note | None) -> None:
        self.own = note
        if note is None:
            self.lowering_of = ()
        with suppress(RuntimeError):
            self.store.set(f"{self.prefix}/{self.rank}", "" if note is None else json.dumps(asdict(note)))
            if note is not None:
                self.store.add(f"{self.prefix}/notes", 1)
            if note is not None and note.is_final:
                with suppress(NotImplementedError):  # by stores of files
                    self.store.append(self.final_key(), f"{json.dumps([self.rank, asdict(note)])}\n")

    def final_key(self) -> str:
        """The key that has the notes of ranks that will not go on; another one after all ranks have started anew."""
        return f"{self.prefix}/final/{self.epoch}"

    def learn_final(self) -> bool:
        """Read what ranks that will not go on have left, if any has; whether anything is known of such ranks.

        One question to the store, however many ranks there are.
        """
        key = self.final_key()
        with suppress(RuntimeError):
            if not self.final and self.store.check([key]):
                lines = [json.loads(line) for line in self.store.get(key).decode().splitlines()]
                if key == self.final_key():  # the program's thread may have started anew meanwhile
                    self.final = {rank: Note(**note) for rank, note in lines}
        return bool(self.final)

    def let_others_read(self, number: int) -> None:
        """Say that this rank ends. The first one may hold the store, so it waits a little until ``number`` have."""
        with suppress(RuntimeError):
            left = self.store.add(f"{self.prefix}/left", 1)
            end = time.monotonic() + _LINGER
            while self.rank == 0 and left < number and time.monotonic() < end:
                time.sleep(TICK)
                left = self.store.add(f"{self.prefix}/left", 0)

    def read(self, ranks: list[int]) -> dict[int, Note]:
        """The notes of other ranks that stand."""
        notes = {rank: note for rank, note in self.final.items() if rank in ranks and rank != self.rank}
        with suppress(RuntimeError):
            if notes or self.store.add(f"{self.prefix}/notes", 0) == 0:
                return notes
            for rank in ranks:
                key = f"{self.prefix}/{rank}"
                text = self.store.get(key) if rank != self.rank and self.store.check([key]) else b""
                if text:
                    notes[rank] = Note(**json.loads(text))
        return notes

    def wait_for(self, key: str, awaited: Sequence[int]) -> None:  # noqa: ARG002  # read from the stack
        """Wait until one of some ranks has set a key of the store, or a failure ends the wait; ``failure`` tells which.

        The thread that looks for failures reads ``awaited`` from the stack: notes of other ranks end no wait here.
        """
        pause = _SHORTEST
        while self.failure is None and not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    @contextmanager
    def compares_as(self, wait: Wait) -> Iterator[None]:
        """While this thread compares something with other ranks: what it waits for."""
        thread = threading.get_ident()
        self.compares[thread] = wait
        try:
            yield
        finally:
            del self.compares[thread]

    def log_of(self, process_group: Any) -> CollectiveLog:
        """What this rank has issued over a process group."""
        name = str(process_group.group_name)
        log = self.logs.get(name)
        if log is None:
            on_device = "nccl" in str(dist.get_backend_config(process_group))
            log = self.logs[name] = CollectiveLog(name, ranks_of(process_group), holds_work=on_device)
            log.start_anew(self.epoch)
        return log

    def forget_calls(self) -> None:
        """Count calls from the beginning; every rank does this after the same calls."""
        self.epoch += 1
        self.final = {}
        for log in self.logs.values():
            log.start_anew(self.epoch)

    def ranks_on(self, mesh: DeviceMesh) -> frozenset[int]:
        """The ranks of a mesh."""
        ranks = self.meshes.get(mesh)
        if ranks is None:
            ranks = self.meshes[mesh] = frozenset(ranks_on(mesh))
        return ranks

    def count_key(self, rank: int) -> str:
        """The key under which a rank counts its errors inside the lowerings of one mesh."""
        return f"{self.prefix}/{rank}/{'-'.join(map(str, self.lowering_of))}"

    def give_up(self, note: Note) -> None:
        """Tell the others that this rank stops because of a note, and close the connections of all process groups."""
        self.failure = note
        self.write(evolve(note, is_final=True))
        for process_group in list(self.process_groups):
            backends = str(dist.get_backend_config(process_group))
            # A receive that is not answered in time closes all connections of the group. One over a connection that
            # its other end has closed fails at once, and closes no other.
            for other in range(process_group.size() if "gloo" in backends else 0):
                with suppress(Exception):
                    if other != dist.get_rank(process_group):
                        process_group.recv([torch.empty(1)], other, 0x5EED).wait(timedelta(milliseconds=1))
            with suppress(Exception):
                if "nccl" in backends:
                    process_group.abort()


@define(eq=False)
class _Process:
    """What a process has: the number of the one whose thread watches (one that is forked from it has neither its thread
    nor its rank), the current world, whether it is ending, what has the thread look at once, and the last error that
    has ended a thread.
    """

    watched: int | None = None
    world: World | None = None
    is_ending: threading.Event = field(factory=threading.Event)
    wakes: threading.Event = field(factory=threading.Event)
    ended_thread: str = ""


PROCESS = _Process()


def current_world() -> World | None:
    """What this rank knows of failures, if anything was watched since its default process group was made."""
    world = PROCESS.world
    if world is None or world.default_group() is not dist.group.WORLD or os.getpid() != PROCESS.watched:
        return None
    return world


def ranks_on(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh, as numbers in the default process group."""
    with outside_modes():  # the mesh makes its tensor of ranks anew, also while a graph is traced
        return tuple(mesh.mesh.flatten().tolist())


def ranks_of(process_group: Any) -> list[int]:
    """The ranks of a process group, as numbers in the default one."""
    return list(dist.get_process_group_ranks(process_group))
