"""Which start of torch.distributed this is, without holding on to its process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

import torch.distributed as dist

__all__ = ["PerWorld", "world_number"]

Content = TypeVar("Content")

_seen: list[Any] = [None, 0]  # a weak reference to the default process group, and how many there were


def world_number() -> int:
    """The number of the default process group: another group, another number. What holds a group is kept by it."""
    now = dist.group.WORLD
    last = _seen[0]
    if now is not (None if last is None else last()):
        _seen[:] = [None if now is None else ref(now), _seen[1] + 1]
    return int(_seen[1])


class PerWorld(Generic[Content]):
    """A set or dict whose content belongs to one start of torch.distributed; ``forget`` empties it after the next."""

    def __init__(self, content: Content, forget: Callable[[], object]) -> None:
        self._content = content
        self._forget = forget
        self._start = 0

    def now(self) -> Content:
        """The content, without what an earlier start left."""
        start = world_number()
        if start != self._start:
            self._start = start
            self._forget()
        return self._content
