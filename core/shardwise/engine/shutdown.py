"""How a process leaves: plans and movers are let go of, and gloo's threads get a moment to let go of theirs.

A thread of gloo keeps the tensors of a collective until a little after it was waited for, and ``destroy_process_group``
does not end it. If it frees a tensor after Python has gone it takes the process down. It needs the interpreter lock for
that, so a sleep lets it through.
"""

from __future__ import annotations

import atexit
import time

from shardwise.comm import groups, redistribute
from shardwise.kernel.dispatcher import clear_plans

__all__ = ["install", "let_go"]

_A_MOMENT = 0.05  # seconds; a thread takes far less once it may run


def let_go() -> None:
    """Forget everything that holds a process group; it is found again when it is asked for."""
    clear_plans()
    redistribute.forget()
    if groups.forget():
        time.sleep(_A_MOMENT)


def install() -> None:
    """Let go before the interpreter does."""
    atexit.register(let_go)
