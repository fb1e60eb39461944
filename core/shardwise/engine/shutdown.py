"""The end of a process: it drops its plans and step runners, and gloo's threads get a moment to drop their tensors.

A thread of gloo keeps the tensors of a collective until a little after the wait for it, and ``destroy_process_group``
does not end the thread. If it frees a tensor after Python has ended, the process crashes. To free one it needs the
interpreter lock, which a sleep hands over.
"""

from __future__ import annotations

import atexit
import time

from shardwise.comm import groups, redistribute
from shardwise.kernel.dispatcher import clear_plans

__all__ = ["install", "let_go"]

_RELEASE_SECONDS = 0.05  # a thread takes far less once it may run


def let_go() -> None:
    """Forget everything that holds a process group; what is needed again is made again."""
    clear_plans()
    redistribute.forget()
    if groups.forget():
        time.sleep(_RELEASE_SECONDS)


def install() -> None:
    """Have this process call :func:`let_go` before it ends."""
    atexit.register(let_go)
