"""The hooks that a plugin implements. They are few and cold: none goes through pluggy during a dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from shardwise.kernel.registry import Registrar

if TYPE_CHECKING:
    from shardwise.kernel.plan import Plan

__all__ = [
    "PROJECT",
    "Registrar",
    "hookimpl",
    "hookspec",
    "shardwise_dispatched",
    "shardwise_links",
    "shardwise_register",
]

PROJECT = "shardwise"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def shardwise_register(registry: Registrar) -> None:
    """Hand the plugin's rules over: ``registry.add(RULE, OTHER_RULE, ...)``. Called once per process; required."""


@hookspec
def shardwise_links(mesh_shape: tuple[int, ...], device_type: str, wires: tuple[str, ...]) -> Any:
    """What redistributions cost on such a mesh, where nothing was measured; None leaves the defaults. Rarely needed.

    ``wires`` has what connects the ranks of each mesh dim (the keys of :data:`shardwise.planning.cost.WIRES`); the
    answer is a :class:`shardwise.planning.cost.Links`. Every rank asks for itself, so it must follow from the arguments
    alone. The first plugin by name that answers counts.
    """


@hookspec
def shardwise_dispatched(plan: Plan) -> None:
    """Watch: called with the plan of every op on MeshTensors, before it runs. Rarely needed.

    While any plugin implements it every dispatch takes the slower way by which observers are told.
    """
