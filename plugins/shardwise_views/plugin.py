"""The plugin's hook: rules for views and what undoes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the modules of rules, imported when an op of theirs is first seen, and what else is said of ops."""
    from shardwise_views import undo
    from shardwise_views.index import MODULES

    registry.add_modules(MODULES)
    for op, function in undo.UNDO.items():
        registry.add_view(op, undo=function)
