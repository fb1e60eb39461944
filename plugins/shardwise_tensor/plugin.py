"""The hook of this plugin: light, so that loading all plugins stays cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of all families."""
    from shardwise_tensor import (
        composites,
        copying,
        counting,
        creating,
        gathering,
        indexing,
        joining,
        masking,
        putting,
        rearranging,
        scattering,
        segments,
        slicing,
    )

    moving = (copying, creating, slicing, joining, rearranging, masking, gathering, scattering, indexing, putting)
    for family in (*moving, counting, segments):
        registry.add(*family.RULES)
    registry.add_compared(*scattering.COMPARED, *segments.COMPARED)
    registry.add_composites(*composites.CREATING)
    for op, function in composites.INSTEAD.items():
        registry.add_composites(op, instead=function)
