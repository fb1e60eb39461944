"""A rank that native code ends says why, where the reason is that ranks have parted.

gloo ends the process where a message is longer than the collective that waits for it: one rank calls ``item()``, the
others sum a gradient. Neither rank has an error of Python then. But the thread that compares what ranks have issued
(:mod:`shardwise.comm.call_posts`) runs on, and so do those of the other ranks. So the end is put off until it has had
time to compare, and this rank then says what it would have raised.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from inspect import currentframe

from attrs import evolve

from shardwise.comm.failure_notes import GONE, PROCESS, TICK, Note, current_world
from shardwise.comm.thread_frames import frames_of_threads, stack_of

__all__ = ["end_with_reason"]

_LOOKS = 6.0  # seconds for two comparisons, and for the calls that the ranks post after them


def end_with_reason() -> None:
    """End this process with what its thread finds within some seconds, as by an error that nobody catches.

    Returns where that finds nothing: the process then ends as native code says.
    """
    world = current_world()
    if world is None or world.size == 1 or PROCESS.is_ending.is_set():
        return
    end = time.monotonic() + _LOOKS
    while world.failure is None and time.monotonic() < end:
        PROCESS.wakes.set()
        time.sleep(TICK / 5)
    if world.failure is None:
        text = "native code has ended its process; its output says where"
        world.write(Note(world.rank, "", GONE, text, GONE, 1, is_final=True))
        return
    # The thread may still be closing connections, for which it needs what this thread holds.
    world.write(evolve(world.failure, is_final=True))
    _report(world.failure.error("native code was about to end the process"))
    world.let_others_read(world.size)
    os._exit(1)


def _report(error: Exception) -> None:
    """Print an error as if the main thread had raised it, which waits in native code and cannot."""
    main = threading.main_thread().ident or 0
    frame = currentframe() if threading.get_ident() == main else frames_of_threads().get(main)
    kept = stack_of(frame)
    stack = traceback.format_stack(kept[0]) if kept else []
    lines = ["Traceback (most recent call last):\n", *stack, *traceback.format_exception_only(error)]
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
