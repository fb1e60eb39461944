"""Functions that ``torch.compile`` takes into a graph as they are, without looking inside.

Dynamo can follow most of Python, but not the value classes and caches that layouts are made of. What it meets of these
in user code are few functions: they become single calls of the graph, which AOTAutograd traces by running them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["register", "traceable"]

P = ParamSpec("P")
R = TypeVar("R")

_functions: list[Callable[..., Any]] = []


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """Let compiled code call ``function`` with tensors, numbers, meshes and placements."""
    _functions.append(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            import shardwise.in_graph  # noqa: F401  # dynamo runs an import where it meets it
        return function(*args, **kwargs)

    return call


def register() -> None:
    """Tell dynamo of the functions. It loads half a second of code, so that waits until something is compiled."""
    torch.compiler.allow_in_graph(_functions)
