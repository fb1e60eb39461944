"""The plugin's hook: rules for torch's quantised products and for this package's own 4-bit product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_quant import dynamic, integers, packed, scaled

    registry.add(*integers.RULES, *packed.RULES, *scaled.RULES, *dynamic.RULES)
