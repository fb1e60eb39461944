"""The recorder of a program, if there is one: it is told of each call, with its operands and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardwise.kernel.placements import Placement
from shardwise.kernel.signature import Op

__all__ = ["NODE", "Recorder", "recording"]

NODE = "_shardwise_node"
"""The attribute by which a recorder knows a tensor. A copy with memory of its own is another tensor."""


class Recorder(Protocol):
    """What records a program. Tensors are those of the tensor class; it must not keep them."""

    #: The plan of the call that runs now: the dispatcher sets it before. None for a call on symbols for sizes.
    plan: Any

    def called(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any) -> None:
        """A call that ran by a rule."""

    def redistributed(self, source: Any, result: Any) -> None:
        """The program, or the layout of a gradient, asked for another layout of a tensor."""

    def accumulated(self, gradient: Any, leaf: Any, is_placed: bool) -> None:
        """A gradient reaches its leaf (None if it is only computed), and has the leaf's layout if ``is_placed``."""

    def waits(self, gradient: Any, leaf: Any, placements: Sequence[Placement]) -> None:
        """A gradient that reaches its leaf waits there for the next ones, to have these placements with them."""

    def trains(self, leaves: Sequence[Any]) -> None:
        """Plain leaves whose gradients come from calls on tensors of the tensor class."""

    def read(self, tensor: Any) -> None:
        """The program took the local part of a tensor."""


class _Recording:
    """The recorder and the checks of this process, and what it has compiled; the hot path never reads them."""

    recorder: Recorder | None = None
    checks: Callable[[Any, Op], Any] | None = None  # makes a handler that checks the calls of another one
    has_compiled: bool = False  # whether torch has compiled code for tensors of the tensor class


recording = _Recording()
