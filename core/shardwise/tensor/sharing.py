"""Whether ``view`` must share memory with its base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.kernel.arguments import check_flag

__all__ = ["is_sharing_asked_for", "sharing_views"]

# One entry per context in force, the innermost last. One list for the process: a backward pass may run in other threads
# than its forward pass.
_asked: list[bool] = []


@contextmanager
def sharing_views(required: bool = True) -> Iterator[None]:
    """Have ``x.view(...)`` raise :class:`ViewError` where the view would need data from another rank.

    Such a view is a copy otherwise, and costs communication when it is made. The context holds for all threads of the
    process; ``required=False`` switches an outer one off.
    """
    check_flag("choose whether views share memory", required, "required")
    _asked.append(required)
    try:
        yield
    finally:
        _asked.pop()


def is_sharing_asked_for() -> bool:
    """Whether the innermost context asks for it."""
    return bool(_asked) and _asked[-1]
