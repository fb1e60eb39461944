"""How a process ends when the one that started it does."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["kill_with_parent"]

_PR_SET_PDEATHSIG = 1


def kill_with_parent(*, on: bool = True) -> None:
    """Have the system kill this process when the thread that started it ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if on else 0)
