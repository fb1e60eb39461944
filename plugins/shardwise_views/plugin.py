"""The plugin's hook: rules for views and what undoes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_views import axes, memory, reinterpret, shapes, strided, undo

    registry.add(*shapes.RULES, *axes.RULES, *reinterpret.RULES, *strided.RULES, *memory.RULES)
    for op, function in undo.UNDO.items():
        registry.add_view(op, undo=function)
