"""A rank that compiles when another rank has failed: it stops as by Ctrl-C, instead of compiling what will never run.

A graph may take minutes to compile, and only then its rank would come to a collective and wait. So a thread that
compiles gets the error of the rank that failed at its next line of Python. Other threads are left alone: they compute,
or write what their program has to write, and learn of the failure when they wait for other ranks.
"""

from __future__ import annotations

import ctypes
import sys

from shardwise.comm.failure_notes import World
from shardwise.errors import RankFailedError
from shardwise.private_torch.compiling import compiles

__all__ = ["stop_compiling"]


def stop_compiling(world: World) -> None:
    """Where a thread of this rank compiles: give up because of the rank that has failed, and have the thread raise."""
    failed = next((note for rank, note in world.final.items() if rank != world.rank and note.message), None)
    threads = [thread for thread, frame in sys._current_frames().items() if compiles(frame)]  # noqa: SLF001  # documented
    if failed is not None and threads:
        world.give_up(failed)
        for thread in threads:
            _raise_in(thread, failed.error(""))


def _raise_in(thread: int, error: BaseException) -> None:
    """Raise an error in a thread. Python asks for a class, and calls it without arguments."""
    kind = type(RankFailedError.__name__, (RankFailedError,), {"__new__": lambda _: error})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
