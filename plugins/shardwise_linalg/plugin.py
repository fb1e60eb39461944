"""The plugin's hook: rules for linear algebra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    from shardwise_linalg import distances, factors, least_squares, solvers, spectra

    registry.add(*factors.RULES, *spectra.RULES, *solvers.RULES, *least_squares.RULES, *distances.RULES)
    registry.add_compared(*distances.COMPARED)
