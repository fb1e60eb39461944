"""The plugin's hook: rules for normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_norm import batch, cudnn, group, layer, weight

    registry.add(*layer.RULES, *group.RULES, *batch.RULES, *cudnn.RULES, *weight.RULES)
