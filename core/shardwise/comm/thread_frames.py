"""What other threads run, read while they may go on.

Up to Python 3.11 any allocation may start the garbage collector, and the collector runs finalizers, which may let
another thread run. A frame object is allocated when it is asked for: by then the frame itself may have returned, and
the object names memory in which something else lies. So the objects are made with the collector off, by calls that
let no other thread run, which hence cannot see that it is off (unless the process has audit hooks, which
``sys._current_frames`` calls before it reads anything). From Python 3.12 on the collector runs between
instructions only.

Up to Python 3.12 a frame's ``f_locals`` is one dictionary, filled anew whenever it is asked for. To fill it drops what
it held before, which may let another thread run as well, so nothing is left in it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from inspect import CO_OPTIMIZED
from itertools import takewhile
from operator import call, is_not
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar, cast

__all__ = ["caller_of", "frames_of_threads", "handled_in", "local_of", "stack_of"]

_T = TypeVar("_T")

_COLLECTS_AT_ALLOCATIONS = sys.version_info < (3, 12)
_FILLS_ONE_DICTIONARY = sys.version_info < (3, 13)
_is_not_true = partial(is_not, True)
_is_not_false = partial(is_not, False)


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each other thread."""
    frames = _uncollected(sys._current_frames)  # noqa: SLF001  # documented; the threads pay nothing
    del frames[get_ident()]  # it holds what it has just been given, hence the frames of all threads
    return frames


def caller_of(frame: FrameType) -> FrameType | None:
    """The frame that called one of another thread; ``frame.f_back`` is for frames of the own thread."""
    caller: FrameType | None = _uncollected(partial(getattr, frame, "f_back"))
    return caller


def stack_of(innermost: FrameType | None) -> list[FrameType]:
    """All frames of a thread, the innermost first. While the list is kept, their ``f_back`` allocates nothing."""
    stack: list[FrameType] = []
    while innermost is not None:
        stack.append(innermost)
        innermost = caller_of(innermost)
    return stack


def local_of(frame: FrameType, name: str) -> Any:
    """The value that a function has for a local name in a frame of another thread; None without one."""
    if not _FILLS_ONE_DICTIONARY:
        return frame.f_locals.get(name)
    if not frame.f_code.co_flags & CO_OPTIMIZED:  # of a module or a class, whose names live in the dictionary
        return None
    values: dict[str, Any] = _uncollected(partial(getattr, frame, "f_locals"))
    value = values.get(name)
    values.clear()
    return value


def handled_in(thread: int) -> BaseException | None:
    """The error that a thread handles, if it handles one."""
    error: Any = _uncollected(sys._current_exceptions).get(thread)  # noqa: SLF001  # documented
    handled: BaseException | None = error[1] if isinstance(error, tuple) else error  # a tuple in Python 3.11
    return handled


def _uncollected(read: Callable[[], _T]) -> _T:
    """What a function of C gives, during which the collector does not run and no other thread either.

    The collector is turned off and on by functions of C too, one after another: Python lets other threads run between
    instructions only, and ``list.extend`` is one.
    """
    if not _COLLECTS_AT_ALLOCATIONS:
        return read()
    done: list[Any] = []
    try:
        while True:  # a round does nothing where another thread has turned the collector on or off before it
            done.extend(takewhile(_is_not_false, map(call, (gc.isenabled, gc.disable, read, gc.enable))))
            if done:
                return cast("_T", done[2])
            done.extend(takewhile(_is_not_true, map(call, (gc.isenabled, read))))
            if done:
                return cast("_T", done[1])
    except BaseException:  # no memory, or an audit hook
        if done and done[0]:
            gc.enable()
        raise
