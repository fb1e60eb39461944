"""The qualified names of parameters and buffers that ``distribute_module`` placed."""

from __future__ import annotations

from typing import Any

from shardwise.kernel.tags import tag_of_name

__all__ = ["NAME", "name_of", "name_tensor", "tag_by_name"]

NAME = "_shardwise_name"
"""The attribute that has it."""


def name_tensor(tensor: Any, name: str) -> None:
    """Note a tensor's qualified name, unless it has one: a tied parameter keeps its first."""
    tensor.__dict__.setdefault(NAME, name)


def name_of(tensor: Any) -> str:
    """The noted name; empty if there is none."""
    name: str = tensor.__dict__.get(NAME, "")
    return name


def tag_by_name(tensor: Any, depth: int) -> None:
    """Give a parameter or buffer that has a name the tag by which decisions know it."""
    name = name_of(tensor)
    if name:
        tensor._spec = tensor._spec.with_tag(tag_of_name(name, depth))
        tensor._follow_layout()
