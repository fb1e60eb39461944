"""Calls that all ranks of a process group make together: every rank gets the answers, or raises the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import frozen

from shardwise.comm.waiting_ranks import explained, failure_behind
from shardwise.errors import CheckpointError, ShardingError

__all__ = ["Ranks"]

T = TypeVar("T")


@frozen
class Ranks:
    """The ranks of a process group (None: the default one); this process alone without torch.distributed."""

    group: Any = None

    @property
    def are_many(self) -> bool:
        return bool(dist.is_available() and dist.is_initialized())

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.are_many else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.are_many else 1

    def all(self, asked: str, call: Callable[[], T]) -> list[T]:
        """Make a call on every rank and return the answers in rank order; the first rank's error is raised on every
        rank.
        """
        mine = _outcome(asked, call, self.rank)
        everyones: list[Any] = [mine]
        if self.are_many:
            everyones = [None] * self.size
            with explained(self.group or dist.group.WORLD):
                dist.all_gather_object(everyones, mine, group=self.group)
        for _, error in everyones:
            if error is not None:
                raise error
        return [value for value, _ in everyones]

    def own(self, asked: str, call: Callable[[], T]) -> T:
        """Make a call on every rank and return this rank's answer; the first rank's error is raised on every rank."""
        mine: list[T] = []
        self.all(asked, lambda: mine.append(call()))
        return mine[0]

    def first(self, asked: str, call: Callable[[], T]) -> T:
        """Make a call on the first rank only; every rank returns its answer or raises its error."""
        mine: list[Any] = [_outcome(asked, call, 0) if self.rank == 0 else None]
        if self.are_many:
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            with explained(self.group or dist.group.WORLD):
                dist.broadcast_object_list(mine, src=source, group=self.group)
        value, error = mine[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    @contextmanager
    def in_torch(self, asked: str) -> Iterator[None]:
        """Around a call of torch.distributed.checkpoint, which raises on every rank what any rank raised."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            yield
        except CheckpointException as error:
            rank, (failure, _) = min(error.failures.items())
            raise _error_for_all(asked, failure, rank) from error
        except RuntimeError as error:
            behind = failure_behind(error, self.group or dist.group.WORLD)
            if behind is None:
                raise
            raise behind from error


def _outcome(asked: str, call: Callable[[], Any], rank: int) -> tuple[Any, ShardingError | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - the other ranks must raise it, too
        return None, _error_for_all(asked, error, rank)


def _error_for_all(asked: str, error: BaseException, rank: int) -> ShardingError:
    """The error that every rank raises."""
    if isinstance(error, ShardingError):
        return error
    return CheckpointError(
        asked=asked,
        found=f"rank {rank} raised {type(error).__name__}: {error}",
        do="Correct that. Earlier checkpoints are unchanged.",
        rank=rank,
    )
