"""The nodes of autograd's graph: which one runs, and which forward calls made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["at_end_of_backward", "backward_number", "running_node", "sequence_number"]

_FOREVER = 1 << 62  # nodes that accumulate in leaves have the largest number of 64 bits


def sequence_number() -> int | None:
    """The number that the next node of this thread gets: nodes are numbered in the order of the forward calls.

    None where torch does not say it. Autograd runs later nodes first by these numbers; nothing public reads them.
    """
    read = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if read is None else int(read())


def running_node() -> int | None:
    """The number of the node that autograd runs in this thread; None without one, and while a leaf accumulates."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if 0 <= number < _FOREVER else None


def backward_number() -> int:
    """The number of the backward pass that runs in this thread; -1 for none."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the backward pass that runs now has ended, as torch's own data parallelism does."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
