"""The plugin's hook: rules for the ops of optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the foreach, fused and loss scaling rules."""
    from shardwise_optim import foreach, fused, norms, scaling, steps

    registry.add(*foreach.RULES, *fused.RULES, *norms.RULES, *scaling.RULES)
    registry.add_compared(*norms.COMPARED)
    registry.add_optimizers(*steps.ELEMENTWISE)
