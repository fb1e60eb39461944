"""The plugin's hook: rules for softmax and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_loss import alignment, elementwise, likelihood, margins, projected, softmax

    registry.add(*softmax.RULES, *likelihood.RULES, *elementwise.RULES, *margins.RULES)
    registry.add(*alignment.RULES, *projected.RULES)
