"""A rank that compiles when another rank has failed: it stops as by Ctrl-C, instead of compiling what will never run.

A graph may take minutes to compile, and only then its rank would come to a collective and wait. So a thread that
compiles gets the error of the rank that failed at its next line of Python. Other threads are left alone: they compute,
or write what their program has to write, and learn of the failure when they wait for other ranks.
"""

from __future__ import annotations

import ctypes
from types import FrameType

from shardwise.comm.failure_notes import World
from shardwise.comm.thread_frames import frames_of_threads, stack_of
from shardwise.errors import RankFailedError
from shardwise.private_torch.compiling import compiling_frame

__all__ = ["raised_as", "stop_compiling"]


def stop_compiling(world: World) -> None:
    """Where a thread of this rank compiles: give up because of the rank that has failed, and have the thread raise.

    To be called again while ``world.compiles`` has threads: a compiler may take an error for a pass that does not
    apply, and go on.
    """
    at_work = _at_work()
    if world.failure is None:
        failed = next((note for rank, note in world.final.items() if rank != world.rank), None)
        if failed is None or not at_work:
            return
        world.compiles = at_work
        world.give_up(failed)
        at_work = _at_work()  # to give up takes its time, and a thread may have finished
    # What a program that has caught the error compiles next is its own affair.
    world.compiles = {thread: frame for thread, frame in world.compiles.items() if at_work.get(thread) is frame}
    for thread in world.compiles:
        assert world.failure is not None
        _raise_in(thread, world.failure.error(""))


def _at_work() -> dict[int, FrameType]:
    """By thread that compiles, the outermost frame of its compiler."""
    stacks = {thread: stack_of(frame) for thread, frame in frames_of_threads().items()}
    return {thread: frame for thread, stack in stacks.items() if (frame := compiling_frame(stack[0])) is not None}


def _raise_in(thread: int, error: BaseException) -> None:
    """Raise an error in a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(raised_as(error)))


def raised_as(error: BaseException) -> type[BaseException]:
    """A class that is this error when it is called. Python takes a class for another thread, and no instance.

    It calls the class without arguments, but with a value if the error arrives while the thread makes another.
    """
    return type(RankFailedError.__name__, (RankFailedError,), {"__new__": lambda *_: error})
