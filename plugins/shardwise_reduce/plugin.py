"""The plugin's hook: rules for reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the modules of rules, imported when an op of theirs is first seen, and what else is said of ops."""
    from shardwise_reduce.compared import COMPARED
    from shardwise_reduce.index import MODULES

    registry.add_modules(MODULES)
    registry.add_compared(*COMPARED)
