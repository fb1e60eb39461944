"""The end of a process: it drops its plans and step runners, and gives gloo's threads time to drop their tensors.

A thread of gloo keeps the tensors of a collective until a little after the wait for it, and ``destroy_process_group``
does not end the thread. If the thread frees a tensor after Python has ended, the process crashes. To free one, the
thread needs the interpreter lock. A sleep releases the lock.
"""

from __future__ import annotations

import atexit
import time

from shardwise.comm import groups, redistribute
from shardwise.kernel.dispatcher import clear_plans

__all__ = ["install", "let_go"]

_RELEASE_SECONDS = 0.05  # a thread needs far less once it has the lock


def let_go() -> None:
    """Drop everything that holds a process group. Later calls make anew what they need."""
    clear_plans()
    redistribute.forget()
    if groups.forget():
        time.sleep(_RELEASE_SECONDS)


def install() -> None:
    """Have this process call :func:`let_go` before it ends."""
    atexit.register(let_go)
