"""The plugin's hook: rules for ops that draw random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register dropout and the draws."""
    from shardwise_random import categories, draws, dropout, leaky, parameters

    for family in (draws, parameters, categories, dropout, leaky):
        registry.add(*family.RULES)
