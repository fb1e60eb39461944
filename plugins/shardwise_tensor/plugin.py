"""The hook of this plugin: light, so that loading all plugins stays cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the modules of rules, imported when an op of theirs is first seen, and what else is said of ops."""
    from shardwise_tensor import composites
    from shardwise_tensor.compared import COMPARED
    from shardwise_tensor.index import MODULES

    registry.add_modules(MODULES)
    registry.add_compared(*COMPARED)
    registry.add_composites(*composites.CREATING)
    for op, function in composites.INSTEAD.items():
        registry.add_composites(op, instead=function)
