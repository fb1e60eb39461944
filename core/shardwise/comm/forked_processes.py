"""A process that a rank has forked is no rank, and has no thread of the backend: its collectives would never end."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from shardwise.comm.failure_notes import PROCESS
from shardwise.errors import ForkedProcessError

__all__ = ["refuse_collectives", "refuse_group_of_parent"]


def refuse_collectives() -> None:
    """Have all groups that the parent has used refuse."""
    for group in list(PROCESS.world.groups) if PROCESS.world is not None else ():
        group.release()  # from what the parent was to do before its next collective
        group.hold(_refuse)


def refuse_group_of_parent(group: Any) -> None:
    """Have a :class:`shardwise.comm.group.Group` refuse that this process met first, if it is one of the parent."""
    world = PROCESS.world
    if world is not None and PROCESS.watched != os.getpid() and world.default_group() is dist.group.WORLD:
        world.groups.add(group)
        group.hold(_refuse)


def _refuse() -> None:
    refuse_collectives()  # the next one, too
    raise ForkedProcessError(
        asked="issue a collective",
        found=f"this process, {os.getpid()}, was forked from a rank, {PROCESS.watched}, and is no rank itself",
        do="Communicate in the process of the rank, as before the fork, or start the other process by spawn.",
    )
