"""The plugin's hook: rules for matrix products, attention and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_matmul import attention, flex, fused, grouped, padding, products, scaled, sums

    registry.add(*products.RULES, *sums.RULES, *grouped.RULES, *scaled.RULES)
    registry.add(*attention.RULES, *flex.RULES, *fused.RULES, *padding.RULES)
    for op, instead in attention.COMPOSITES.items():
        registry.add_composites(op, instead=instead)
    for operator, function in flex.HIGHER_ORDER.items():
        registry.add_higher_order(operator, function)
