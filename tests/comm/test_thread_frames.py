"""What a thread reads of others that go on meanwhile: in Python 3.11 the garbage collector may let them run."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

from shardwise.comm.thread_frames import caller_of, frames_of_threads, handled_in, local_of, stack_of

MOMENT = 0.05  # seconds for which another thread may run


class LetsOthersRun:
    """Garbage whose finalizer lets another thread go on."""

    def __init__(self, gate: threading.Event) -> None:
        self.itself, self.gate = self, gate

    def __del__(self) -> None:
        self.gate.set()
        time.sleep(MOMENT)


class Other:
    """A thread that waits in the innermost of two calls, then returns from both and fills their memory with others."""

    def __init__(self) -> None:
        self.waits, self.gate, self.end = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self.thread.start()
        assert self.waits.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self.end.set()
        self.thread.join()

    @property
    def innermost(self) -> FrameType:
        """The frame of :meth:`inner`; around it are those of the event."""
        frame: FrameType | None = frames_of_threads()[self.thread.ident or 0]
        while frame is not None and frame.f_code.co_name != "inner":
            frame = caller_of(frame)
        assert frame is not None
        return frame

    def _run(self) -> None:
        self.outer()
        self.filler(4)

    def outer(self) -> None:
        self.inner()

    def inner(self) -> None:
        value: Any = [1]
        self.waits.set()
        self.gate.wait(10)
        del value

    def filler(self, depth: int, a: int = 1, b: int = 2, c: int = 3) -> int:
        d, e = a, b
        if depth:
            return self.filler(depth - 1) + c
        self.end.wait(10)
        return d + e


@contextmanager
def collector() -> Iterator[None]:
    """Around what turns the garbage collector off or changes when it runs."""
    was, threshold = gc.isenabled(), gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if was else gc.disable)()


# Which of the allocations of a look is that of the frame depends on the Python.
@pytest.mark.parametrize("allocations", range(1, 9))
@pytest.mark.parametrize("of", [caller_of, lambda frame: stack_of(frame)[1]], ids=["caller_of", "stack_of"])
def test_a_frame_is_that_of_the_thread_though_its_allocation_collects(
    of: Callable[[FrameType], FrameType | None], allocations: int
):
    with Other() as other, collector():
        gc.disable()
        inner = other.innermost
        gc.collect()
        LetsOthersRun(other.gate)
        gc.set_threshold(allocations)
        gc.enable()
        frame = of(inner)
        gc.disable()
        assert frame is not None
        assert frame.f_code.co_name == "outer"


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_stays_as_it_was(is_on: bool):
    with Other() as other, collector():
        (gc.enable if is_on else gc.disable)()
        frame = caller_of(other.innermost)
        local_of(other.innermost, "value")
        handled_in(threading.get_ident())
        assert gc.isenabled() is is_on
    assert frame is not None


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_stays_as_it_was_after_an_error(is_on: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "_current_frames", partial(int, "refused by an audit hook"))
    with collector():
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(ValueError, match="audit hook"):
            frames_of_threads()
        assert gc.isenabled() is is_on


def test_no_other_thread_sees_the_collector_turned_off():
    alone = [sys.executable, str(Path(__file__).with_name("looks_at_the_collector.py"))]  # no threads of other tests
    done = subprocess.run(alone, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True"]


def test_a_local_value_is_read_and_not_kept():
    class Value:
        pass

    waits, gate, dropped, end = (threading.Event() for _ in range(4))

    def function() -> None:
        value: Any = Value()
        refs.append(weakref.ref(value))
        waits.set()
        gate.wait(10)
        value = None
        dropped.set()
        end.wait(10)
        del value

    refs: list[Any] = []
    thread = threading.Thread(target=function)
    thread.start()
    assert waits.wait(10)
    frames = stack_of(frames_of_threads()[thread.ident or 0])
    frame = next(frame for frame in frames if frame.f_code is function.__code__)
    try:
        assert isinstance(local_of(frame, "value"), Value)
        assert local_of(frame, "absent") is None
        gate.set()
        assert dropped.wait(10)
        assert refs[0]() is None, "the look keeps what the thread has dropped"
        assert local_of(frame, "value") is None
    finally:
        gate.set()
        end.set()
        thread.join()


class Asks:
    """Asks at its end what the thread handles."""

    def __exit__(self, *_: object) -> None:
        self.handled = handled_in(threading.get_ident())

    def __enter__(self) -> Self:
        return self


def test_the_error_that_a_thread_handles():
    assert handled_in(threading.get_ident()) is None
    asks = Asks()
    with pytest.raises(KeyError, match="k") as error, asks:
        raise KeyError("k")
    assert asks.handled is error.value
    assert handled_in(-1) is None
