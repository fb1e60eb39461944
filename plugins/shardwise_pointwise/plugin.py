"""The plugin's hook: rules for elementwise ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register one rule per group of ops that pass the same partial tensors on."""
    from shardwise_pointwise import cells, elementwise, fake_quantization, gated, table

    registry.add(*table.RULES, *gated.RULES, *fake_quantization.RULES, *cells.RULES)
    for name in table.LATE:
        registry.add_later(name, lambda op: elementwise.elementwise_of([op]))
