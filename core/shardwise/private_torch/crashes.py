"""What torch shows where native code ends the process."""

from __future__ import annotations

import signal
from collections.abc import Callable

from shardwise.private_torch.parts import find_part

__all__ = ["show_native_stacks"]


def show_native_stacks() -> None:
    """From here on, have torch write the native stack of every thread to stderr when a signal such as SIGABRT ends this
    process. Call this in the main thread.

    Python's faulthandler knows Python's threads alone, and gloo has threads of its own. No public function does it;
    without this one nothing is written.
    """
    if _show is None:
        return
    interrupted = signal.getsignal(signal.SIGINT)
    _show(True)
    if interrupted is not None:  # torch counts Ctrl-C among the fatal ones
        signal.signal(signal.SIGINT, interrupted)


_show: Callable[[bool], None] | None = find_part("torch._C._set_print_stack_traces_on_fatal_signal")
