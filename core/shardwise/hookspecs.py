"""The hooks that a plugin implements. They are few and cold: none runs during a dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from shardwise.registry import Registrar

__all__ = ["PROJECT", "hookimpl", "hookspec", "shardwise_register"]

PROJECT = "shardwise"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def shardwise_register(registry: Registrar) -> None:
    """Hand the plugin's rules over: ``registry.add(RULE, OTHER_RULE, ...)``. Called once per process."""
