"""The store of the default process group as ranks use it for their notes: it may end before this rank does.

Where the ranks are not started by ``torchrun``, the process of the first rank holds the store, and takes it along when
it ends. Torch writes a native stack to stderr for each call of a store that is gone, and a thread of each rank calls it
several times a second. So before a call this rank sees, without sending anything, whether the store is still there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch.distributed as dist

from shardwise.comm.processes import Process
from shardwise.private_torch.distributed import connection_to

__all__ = ["SharedStore", "StoreGoneError"]

_MANY = 256  # beyond so many ranks the process that holds the store may not have a file for one more connection of each
_END = 2.0  # seconds in which the system closes what a process had open
_SOON = 0.005  # seconds between two looks


class StoreGoneError(RuntimeError):
    """The store has ended, as the process that held it has."""


class SharedStore:
    """A store of torch, whose calls raise :class:`StoreGoneError` once it is gone.

    ``holder`` is the process of the first rank, where that is one of this host. It may not have the store, as with
    ``torchrun``: then the store outlives it.
    """

    def __init__(self, store: Any, ranks: int) -> None:
        self.store = store
        self.holder: Process | None = None
        self._connection = connection_to(store) if ranks <= _MANY else None
        self._is_gone = False
        if self._connection is not None:
            finalize(self, self._connection.close)

    def is_gone(self) -> bool:
        """Whether the process that had the store has ended. Waits for one that is ending: its last answer may not come.

        What happens between this and a call is not seen; torch then writes one stack.
        """
        holder, end = self.holder, time.monotonic() + _END  # another thread may take it away meanwhile
        while holder is not None and not self._is_closed() and holder.is_ending():
            if time.monotonic() >= end:
                self.holder = None
                break
            time.sleep(_SOON)
        return self._is_closed()

    def _is_closed(self) -> bool:
        if not self._is_gone and self._connection is not None:
            try:
                self._is_gone = not self._connection.recv(1)
            except BlockingIOError:  # there is nothing to read, as ever
                pass
            except OSError:
                self._is_gone = True
        return self._is_gone

    def _call(self, method: str, *arguments: Any) -> Any:
        if self.is_gone():
            raise StoreGoneError("the connection to the store has ended, as the process that held the store has")
        try:
            return getattr(self.store, method)(*arguments)
        except dist.DistNetworkError:
            self._is_gone = True
            raise

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; what it is then."""
        return int(self._call("add", key, amount))

    def append(self, key: str, value: str) -> None:
        """Append to a text. Raises :class:`NotImplementedError` for a store of files."""
        self._call("append", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of some keys are there."""
        return bool(self._call("check", list(keys)))

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Set a key if it has an expected value, or if it is not there and nothing is expected."""
        self._call("compare_set", key, expected, value)

    def delete_key(self, key: str) -> None:
        """Drop a key. Raises :class:`NotImplementedError` for a store of files."""
        self._call("delete_key", key)

    def get(self, key: str) -> bytes:
        """What a key has; waits until it is there."""
        return bytes(self._call("get", key))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._call("set", key, value)
