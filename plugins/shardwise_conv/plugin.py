"""The plugin's hook: rules for convolution and pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_conv import convolution, grid, planes, shuffle, unpooling

    registry.add(*convolution.RULES, *planes.RULES, *grid.RULES, *shuffle.RULES, *unpooling.RULES)
