"""The plugin's hook: rules for reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_reduce import along, extremes, largest, moments, norms, positions, scans, sums

    modules = (sums, extremes, moments, norms, positions, along, scans, largest)
    registry.add(*(rule for module in modules for rule in module.RULES))
    registry.add_compared(*extremes.COMPARED, *norms.COMPARED, *along.COMPARED)
