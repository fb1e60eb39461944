"""The nodes of autograd's graph: which one runs, which forward calls made it, and what hooks a leaf has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from shardwise.private_torch.parts import find_part, refuse, torch_part

__all__ = ["at_end_of_backward", "backward_number", "hooks_of", "outer_nodes", "running_node", "sequence_number"]

_FOREVER = 1 << 62  # nodes that accumulate in leaves have the largest number of 64 bits

_next_number: Callable[[], int] | None = find_part("torch._C._autograd._get_sequence_nr")
_current_node: Callable[[], Any] = torch_part(
    "torch._C._current_autograd_node", "tell which node of a backward pass runs"
)
# The engine calls it for a node of a program's own class, whose number it has.
_own_node: CodeType | None = find_part("torch.autograd.function.BackwardCFunction.apply.__code__")
# As torch's own data parallelism does.
_queue_callback: Callable[[Callable[[], None]], None] = torch_part(
    "torch.autograd.Variable._execution_engine.queue_callback", "wait for the end of a backward pass"
)


def sequence_number() -> int:
    """The number that the next node of this thread gets: nodes are numbered in the order of the forward calls.

    Autograd runs later nodes first by these numbers; nothing public reads them. Without torch's function a node is made
    and asked, and takes a number.
    """
    if _next_number is not None:
        return int(_next_number())
    with torch.inference_mode(False), torch.enable_grad():
        return _number_of(torch.zeros((), requires_grad=True).abs().grad_fn) + 1


def running_node() -> int | None:
    """The number of the node that autograd runs in this thread; None without one, and while a leaf accumulates."""
    node = _current_node()
    if node is None:
        return None
    number = _number_of(node)
    return number if 0 <= number < _FOREVER else None


def _number_of(node: Any) -> int:
    if not hasattr(node, "_sequence_nr"):
        refuse("torch.autograd.graph.Node._sequence_nr", "tell which forward call a node of a backward pass is of")
    return int(node._sequence_nr())


def outer_nodes() -> Iterator[int]:
    """The numbers of the nodes in whose backward functions the running one runs, innermost first: a checkpoint of the
    reentrant kind computes what it did not keep, and runs a backward pass of its own.

    The engine keeps the outer ones on its own stack. Where torch has no frame of this kind there are none.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _own_node:
            yield _number_of(frame.f_locals["self"])
        frame = frame.f_back


def backward_number() -> int:
    """The number of the backward pass that runs in this thread; -1 for none."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the backward pass that runs now has ended."""
    _queue_callback(callback)


def hooks_of(leaf: torch.Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks of a leaf: on its gradient, and after the gradient is accumulated. Nothing public lists them.

    These are torch's own dicts: the handle of a hook removes it from there.
    """
    tensor: Any = leaf
    return tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}
