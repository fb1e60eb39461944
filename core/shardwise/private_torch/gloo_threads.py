"""The threads in which gloo's collectives run.

Such a thread lets go of a collective's tensors a moment after the program has been told that it is done. If Python has
begun to end by then, the thread asks for the interpreter's lock, Python ends the thread, and C++ ends the process
("terminate called without an active exception", SIGABRT; torch 2.11 to 2.13). On a busy machine the moment is long.
Torch has no public function that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["await_rest"]

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PAUSE = 0.001  # seconds, in which other threads can have the lock


def await_rest(seconds: float, tasks: Path = _TASKS) -> bool:
    """Wait until the threads of gloo sleep, twice in a row, as they do when they have let go of everything; at most so
    many seconds. Returns whether they do. Where the system does not say how threads are, nobody waits.
    """
    end = time.monotonic() + seconds
    rests = 0
    while rests < 2:  # noqa: PLR2004  # one look may come between two steps of a thread
        states = list(_states(tasks))
        if not states:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
        rests = rests + 1 if set(states) == {"S"} else 0
    return True


def _states(tasks: Path) -> Iterator[str]:
    """The state of each thread of gloo, as proc(5) names it: S sleeps, R runs or would run."""
    with suppress(OSError):  # not Linux
        for task in tasks.iterdir():
            with suppress(OSError):  # the thread has ended
                if (task / "comm").read_text().strip() == _NAME:
                    # The name, which comes before the state, may have any character.
                    yield (task / "stat").read_text().rpartition(")")[2].split()[0]
