"""Worlds: the default process groups of torch.distributed that this process has had, without keeping them alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

import torch.distributed as dist

__all__ = ["PerWorld", "world_number"]

Content = TypeVar("Content")

_seen: list[Any] = [None, 0]  # a weak reference to the default process group, and how many there were


def world_number() -> int:
    """A number that changes with the default process group. A cache of what ends with that group has it in its keys."""
    world = dist.group.WORLD
    last = _seen[0]
    if world is not (None if last is None else last()):
        _seen[:] = [None if world is None else ref(world), _seen[1] + 1]
    return int(_seen[1])


def _no_group() -> None:
    """A weak reference to nothing, for the time before there is a default process group."""


class PerWorld(Generic[Content]):
    """A container for what belongs to one default process group; ``empty`` is called when there is another one."""

    __slots__ = ("_content", "_empty", "_group")

    def __init__(self, content: Content, empty: Callable[[], object]) -> None:
        self._content = content
        self._empty = empty
        self._group: Callable[[], Any] = _no_group

    def now(self) -> Content:
        """The container, emptied of what belongs to an earlier default process group."""
        if self._group() is not dist.group.WORLD:  # not by `world_number`: every redistribution calls this
            world = dist.group.WORLD
            self._group = _no_group if world is None else ref(world)
            self._empty()
        return self._content
