"""Functions that ``torch.compile`` puts into a graph as single calls, without tracing their Python code.

Dynamo can trace most Python code, but not the value classes and caches of layouts. Only a few functions that user code
calls use them. These become single calls in dynamo's graph, and AOTAutograd runs them to trace their ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from shardwise.comm.rank_failures import telling
from shardwise.private_torch.tracing import graph_calls

__all__ = ["traceable"]

_ALLOWS = "shardwise.tensor.allow_in_graph"

P = ParamSpec("P")
R = TypeVar("R")


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Let compiled code call ``function`` with tensors, numbers, dtypes, meshes and placements.

    The other ranks are told of its errors: every rank must call such a function, and some wait for each other in it.
    """
    told = telling(function)
    _take_name(told, function)
    graph_calls.append(told)
    if _ALLOWS in sys.modules:  # something was compiled before this function's module was imported
        torch.compiler.allow_in_graph(told)  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Dynamo runs an import when it traces it, and so knows the function when it traces the call.
            import shardwise.tensor.allow_in_graph  # noqa: F401
        return told(*args, **kwargs)

    _take_name(call, function)
    return call


def _take_name(wrapper: Any, function: Callable[..., Any]) -> None:
    """Have tracebacks, and what is said of a collective, name the function that the program called."""
    code = wrapper.__code__
    wrapper.__code__ = code.replace(co_name=function.__name__, co_qualname=function.__qualname__)
