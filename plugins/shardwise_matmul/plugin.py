"""The plugin's hook: rules for matrix products, attention and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the modules of rules, imported when an op of theirs is first seen, and what else is said of ops."""
    from shardwise_matmul.composites import COMPOSITES
    from shardwise_matmul.higher_order import HIGHER_ORDER
    from shardwise_matmul.index import MODULES

    registry.add_modules(MODULES)
    for op, instead in COMPOSITES.items():
        registry.add_composites(op, instead=instead)
    for operator, function in HIGHER_ORDER.items():
        registry.add_higher_order(operator, function)
