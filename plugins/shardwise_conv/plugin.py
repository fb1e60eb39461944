"""The plugin's hook: rules for convolution and pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the modules of rules, each imported when an op of its own is first seen."""
    from shardwise_conv.index import MODULES

    registry.add_modules(MODULES)
