"""The qualified names of parameters and buffers that ``distribute_module`` placed."""

from __future__ import annotations

from typing import Any

__all__ = ["name_of", "name_tensor"]

_NAME = "_shardwise_name"


def name_tensor(tensor: Any, name: str) -> None:
    """Note a tensor's qualified name, unless it has one: a tied parameter keeps its first."""
    tensor.__dict__.setdefault(_NAME, name)


def name_of(tensor: Any) -> str:
    """The noted name; empty if there is none."""
    name: str = tensor.__dict__.get(_NAME, "")
    return name
