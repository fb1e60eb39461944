"""A rank that issues nothing more: its program has ended, or has destroyed its process groups.

It tells the others, so that those which wait for it say what it did. Such a note is not final: what this rank has sent
may still be on its way.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch.distributed as dist

from shardwise.comm.call_posts import post_calls
from shardwise.comm.failure_notes import ENDED, LEFT, PROCESS, Note, World, current_world

__all__ = ["end_program", "left_world", "tell_left_groups"]


def end_program() -> None:
    """Tell the others that this rank has come to the end of its program, and issues nothing more until it starts anew.

    An error that it has caught, or that has ended one of its threads, may be why it ended before others, so the note
    has it.
    """
    world = current_world()
    if world is not None:
        _tell(world, ENDED)


def tell_left_groups(*, is_end: bool = False) -> World | None:
    """Tell the others where this rank's program has destroyed its process groups; their world, if it has.

    An error of this rank that they know of explains more, until the program comes to its end in spite of it.
    """
    world = left_world()
    if world is not None and (is_end or world.own is None):
        _tell(world, LEFT)
    return world


def left_world() -> World | None:
    """The world whose process groups this program has destroyed, as in ``finally``: other ranks may wait in it."""
    is_left = PROCESS.watched == os.getpid() and not dist.is_initialized()
    return PROCESS.world if is_left else None


def _tell(world: World, kind: str) -> None:
    if world.own is not None and (world.own.is_final or world.own.is_end):
        return
    message = _last_error(world)
    with suppress(RuntimeError):
        post_calls(world)
    world.write(Note(world.rank, "", kind, message, "", 1, is_final=False))


def _last_error(world: World) -> str:
    """What a rank says of the last error that has not ended its program."""
    if world.own is not None:
        where = f" in {world.own.op}" if world.own.op else ""
        return f"it had caught {world.own.kind}{where}, {world.own.message}"
    return PROCESS.ended_thread
