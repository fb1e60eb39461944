"""The functions that ``torch.compile`` takes into a graph as single calls; :mod:`shardwise.traceable` adds to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["graph_calls"]

graph_calls: list[Callable[..., Any]] = []
"""Dynamo knows them by identity, and these references keep them as they are."""
