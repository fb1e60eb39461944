"""A signal that asks a command to end: what it has started ends too, and its temporary folders go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "unwinding_at_signals"]

_NAMES = ("SIGTERM", "SIGHUP")  # not every system has them


class Terminated(KeyboardInterrupt):
    """Somebody asked this process to end, as by Ctrl-C; ``number`` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def unwinding_at_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise :class:`Terminated` in the main thread, where they would end the process at once:
    Python then cleans up nothing. A second one ends it at once.
    """
    process = os.getpid()

    def unwind(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:  # a child that the program has forked
            os.kill(os.getpid(), number)
            return
        raise Terminated(number)

    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    # Those that the parent has this process ignore, as nohup does, stay ignored.
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    # Under torchrun a rank may wait in native code, where it would hear of no signal.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        taken = []
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
