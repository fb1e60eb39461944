"""What plans have moved lately: operands under the layouts that they were redistributed to, for their next consumers.

Three projections of one activation gather it once. All decisions here are the same on every rank, because a rank that
takes a kept tensor sends nothing, and no other rank may wait for it:

- A kept tensor belongs to the wrapper of its source: to the object that the program holds, not to an address that
  Python or an allocator may use again. It goes with the wrapper. A wrapper that is gone asks for nothing, so it does
  not matter when a rank collects it.
- It holds as long as no op has written the memory of its source. Ops on MeshTensors are counted by memory, the same on
  every rank. What the program writes to a part that it got from ``to_local()`` shows in torch's version counter.
- Old ones are dropped in the order in which they were made, once all together exceed ``limit`` bytes. Their bytes are
  those of the largest part. Those of which the wrapper is gone count as before: ranks may collect them at other times.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import cache
from typing import Any

import torch
from attrs import define, field

from shardwise.kernel.engine import started
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.view_copies import Writes, writes_of
from shardwise.private_torch.dispatch import new_wrapper, version_of

__all__ = ["KeptMove", "KeptMoves", "has_moves", "kept_moves", "leave_out", "moves_of"]


class KeptMove:
    """An operand under another layout. ``stream`` is that of its device on which it was made."""

    __slots__ = ("__weakref__", "_seen", "_source", "_spec", "_version", "_wrapper", "_writes", "local", "stream")

    def __init__(self, source: torch.Tensor, local: torch.Tensor, spec: TensorSpec, stream: Any) -> None:
        self.local: torch.Tensor | None = local
        self.stream = stream
        self._spec = spec
        self._wrapper: Any = None
        self._source: torch.Tensor | None = source
        self._version = version_of(source)
        self._writes: Writes | None = writes_of(source)
        self._seen = self._writes.count

    def holds(self, source: torch.Tensor, stream: Any) -> bool:
        """Whether it is still here, and its source is this local tensor and was not written."""
        return (
            self._writes is not None
            and self._source is source
            and self._seen == self._writes.count
            and self._version == version_of(source)
            and self.stream == stream
        )

    @property
    def tensor(self) -> Any:
        """It as a tensor on the mesh. What it is moved to in its turn is kept with this tensor."""
        if self._wrapper is None:
            self._wrapper = new_wrapper(started.tensor_class, self.local, self._spec, False)
        return self._wrapper

    def drop(self) -> None:
        """Let go of the memory."""
        self.local = self._source = self._writes = self._wrapper = None


@define(eq=False)
class KeptMoves:
    """The order in which tensors were kept, which is that in which they are dropped."""

    limit: int
    held: int = 0
    _order: deque[tuple[weakref.ref[KeptMove], int]] = field(factory=deque)

    def make_room(self, nbytes: int) -> None:
        """Drop the oldest until so many bytes fit in."""
        while self._order and (self.held + nbytes > self.limit or len(self._order) >= _MOST):
            oldest, size = self._order.popleft()
            self.held -= size
            if (move := oldest()) is not None:
                move.drop()

    def add(self, move: KeptMove, nbytes: int) -> None:
        """Note the newest."""
        self._order.append((weakref.ref(move), nbytes))
        self.held += nbytes

    def clear(self) -> None:
        """Drop all. Every rank must call this at the same point of the program."""
        while self._order:
            if (move := self._order.popleft()[0]()) is not None:
                move.drop()
        self.held = 0


_MOST = 1024  # objects, however small

kept_moves = KeptMoves(0)
"""Those of this process. The engine sets the limit."""


def moves_of(root: Any) -> dict[Any, KeptMove] | None:
    """What is kept for a wrapper, by source and target layout; None for one that :func:`leave_out` left out."""
    slot = _slot()
    try:
        moves: dict[Any, KeptMove] | None = slot.__get__(root)
    except AttributeError:
        slot.__set__(root, moves := {})
    return moves


def has_moves(root: Any) -> bool:
    """Whether anything is kept for a wrapper, or was."""
    return bool(getattr(root, "_kept_moves", None))


def leave_out(wrapper: Any) -> None:
    """Keep nothing for a wrapper: the program holds its memory, and may write it by other means than torch's ops."""
    _slot().__set__(wrapper, None)


@cache
def _slot() -> Any:
    """The slot of the tensor class that holds them."""
    return started.tensor_class.__dict__["_kept_moves"]
