"""The modes of this thread: whether a graph is written, whether ops run on values now, and how to leave the modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _python_dispatch

__all__ = [
    "count_modes",
    "is_python_dispatched",
    "is_run_now",
    "leave_modes",
    "outside_modes",
    "recording_mode",
    "tracer_now",
]

recording_mode: Callable[[], Any] = partial(
    torch._C._get_dispatch_mode,
    torch._C._TorchDispatchModeKey.PROXY,
)
"""The mode that writes what it sees into a graph, or None. No public function says whether there is one."""


def outside_modes() -> AbstractContextManager[Any]:
    """A context in which tensors are real and kernels run without the GIL, also while a graph is traced. There is no
    public API to leave a mode.
    """
    if is_run_now():
        return nullcontext()
    return leave_modes()


count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes are on in this thread. No public function says so."""
_is_included, _PYTHON_DISPATCHER = (
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C.DispatchKey.PythonDispatcher,
)


def is_run_now() -> bool:
    """Whether an op that is called now runs on values: no graph is traced, and no mode sees the op first and then calls
    it again.
    """
    return not (count_modes() or _is_included(_PYTHON_DISPATCHER))


def is_python_dispatched() -> bool:
    """Whether ops go through the dispatcher for Python kernels, as they do while a graph is traced."""
    return _is_included(_PYTHON_DISPATCHER)


@contextmanager
def leave_modes() -> Iterator[None]:
    """Leave the modes of this thread, which are known to be on."""
    # A trace turns the dispatcher for Python kernels on, which calls every kernel with the GIL held. That can deadlock:
    # a collective's kernel waits for a lock of gloo, and the gloo thread that holds it waits for the GIL.
    tracer, _left.tracer = _left.tracer, tracer_now()
    try:
        with _python_dispatch._disable_current_modes(), torch._C._DisablePythonDispatcher():
            yield
    finally:
        _left.tracer = tracer


class _Left(threading.local):
    """The tracer of the graph that this thread is making, kept while the modes are off."""

    tracer: Any = None


_left = _Left()


def tracer_now() -> Any:
    """What writes the graph that this thread is making, also outside the modes; None if it makes none."""
    mode = recording_mode()
    return _left.tracer if mode is None else mode.tracer
