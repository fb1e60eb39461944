"""Functions that ``torch.compile`` takes into a graph as they are, without looking inside.

Dynamo can follow most of Python, but not the value classes and caches that layouts are made of. What user code calls
that is made of them are few functions: they become single calls of dynamo's graph, and AOTAutograd traces by running
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from shardwise.private_torch.tracing import graph_calls

__all__ = ["traceable"]

P = ParamSpec("P")
R = TypeVar("R")


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Let compiled code call ``function`` with tensors, numbers, dtypes, meshes and placements."""
    graph_calls.append(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Dynamo runs an import where it meets one, and knows the function when it comes to the call.
            import shardwise.tensor.allow_in_graph  # noqa: F401
        return function(*args, **kwargs)

    return call
