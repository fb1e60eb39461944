"""The end of a process by a C++ exception that nothing catches.

The thread in which gloo reads from its connections throws one where a message is longer than what is expected, and no
``try`` of Python is around that thread. C++ calls a function then, which the process may choose.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["at_native_end", "leave_native_ends"]

_FUNCTION = ctypes.CFUNCTYPE(None)
_NAME = "_ZSt13set_terminatePFvvE"  # std::set_terminate, by the rules for names that all but Microsoft's compilers keep

_kept: list[object] = []  # C++ has the address of a function, which must stay; the last is in force
_before: list[int | None] = []


def at_native_end(call: Callable[[], None]) -> bool:
    """Have ``call`` run in the thread that throws, before the process ends as it would have; False where C++ has no
    such function here. The thread may hold locks of native code, so ``call`` must not wait for what that code does.
    """
    choose = _set_terminate()
    if choose is None:
        return False

    def end() -> None:
        try:
            call()
        finally:
            before = _before[-1] if _before else None
            ctypes.CFUNCTYPE(None)(before)() if before else ctypes.CDLL(None).abort()

    function = _FUNCTION(end)
    _kept.append(function)
    _before.append(choose(ctypes.cast(function, ctypes.c_void_p)))
    return True


def leave_native_ends() -> None:
    """What was in force before :func:`at_native_end` is in force again."""
    choose = _set_terminate()
    if choose is not None and _before:
        choose(_before.pop())


def _set_terminate() -> Callable[..., int | None] | None:
    """The function of C++ that chooses; torch has loaded the library that has it."""
    for library in (None, "libstdc++.so.6", "libc++.1.dylib"):
        try:
            choose = ctypes.CDLL(library)[_NAME]
        except (OSError, AttributeError):
            continue
        choose.argtypes, choose.restype = [ctypes.c_void_p], ctypes.c_void_p
        return choose
    return None
