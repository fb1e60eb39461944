"""Which world this is: which default process group of torch.distributed, without holding on to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

import torch.distributed as dist

__all__ = ["PerWorld", "world_number"]

Content = TypeVar("Content")

_seen: list[Any] = [None, 0]  # a weak reference to the default process group, and how many there were


def world_number() -> int:
    """A number that changes with the default process group. It is in the keys of what ends with that group."""
    now = dist.group.WORLD
    last = _seen[0]
    if now is not (None if last is None else last()):
        _seen[:] = [None if now is None else ref(now), _seen[1] + 1]
    return int(_seen[1])


def _no_group() -> None:
    """In place of a weak reference, before there is a default process group."""


class PerWorld(Generic[Content]):
    """A container whose content belongs to one default process group; ``empty`` empties it when there is another."""

    __slots__ = ("_content", "_empty", "_group")

    def __init__(self, content: Content, empty: Callable[[], object]) -> None:
        self._content = content
        self._empty = empty
        self._group: Callable[[], Any] = _no_group

    def now(self) -> Content:
        """The container, without what belongs to an earlier default process group."""
        if self._group() is not dist.group.WORLD:  # in line: every redistribution asks
            group = dist.group.WORLD
            self._group = _no_group if group is None else ref(group)
            self._empty()
        return self._content
