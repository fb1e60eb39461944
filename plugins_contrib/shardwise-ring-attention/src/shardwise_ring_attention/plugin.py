"""The plugin's hook: rules for attention that replace those that come with shardwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_ring_attention import rules

    registry.add(*rules.RULES, replaces="shardwise")
