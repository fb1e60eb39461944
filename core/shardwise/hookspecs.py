"""The hooks that a plugin implements. They are few, and a dispatch never calls one through pluggy."""

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

#: The name under which pluggy keeps the hooks.
PROJECT = "shardwise"
#: Marks the hooks of this module, which a plugin may implement.
hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's function of the same name as a hook: ``@hookimpl``.
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def shardwise_register(registry: Registrar) -> None:
    """Register the plugin's rules: ``registry.add(RULE, OTHER_RULE, ...)``. Called once per process; required."""


@hookspec
def shardwise_links(mesh_shape: tuple[int, ...], device_type: str, wires: tuple[str, ...]) -> Any:
    """The figures for costs on a mesh that was not measured; None keeps the defaults. Rarely needed.

    ``wires`` has the connection of each mesh dim, a key of :data:`shardwise.planning.cost.WIRES`. The hook returns a
    :class:`shardwise.planning.cost.Links`. Every rank calls it by itself, so the result may depend on the arguments
    only. Plugins are called in the order of their names, and the first result is used.
    """


@hookspec
def shardwise_dispatched(plan: Plan) -> None:
    """Observe the plan of every op on MeshTensors, before the op runs. Rarely needed.

    While a plugin implements it, every dispatch takes the slower path that calls observers.
    """
