"""Operators that take functions: what a plugin has for one runs in its place.

Torch calls neither ``__torch_dispatch__`` nor a registered kernel for them; it asks a table of the operator by class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.errors import NoRuleError
from shardwise.kernel.dispatcher import dispatch
from shardwise.kernel.signature import Op
from shardwise.private_torch.dispatch import run_under_watchers
from shardwise.private_torch.ops import for_class

__all__ = ["take_higher_order"]


def take_higher_order(op: Any, tensor_class: type, functions: Callable[[], Mapping[Any, Callable[..., Any]]]) -> object:
    """Run what ``functions()`` has now for an operator where an operand is on a mesh; returns what torch calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        function = functions().get(op)
        if function is None:
            raise NoRuleError(
                asked=f"run {op} on MeshTensors",
                found="no plugin that is loaded has a function for this operator of higher order",
                do="Load the plugin that has one (registry.add_higher_order), loop over the tensors in Python, or "
                "call it on to_local() of each rank.",
                op=str(op),
            )
        return function(_call, *args, **kwargs)

    for_class(op, tensor_class, run)
    run_under_watchers(op, tensor_class)
    return run


def _call(op: Op, *args: Any) -> Any:
    # Not through torch's dispatcher: below it vmap does not work, and these operators run functions under vmap.
    return dispatch(op, args, {})
