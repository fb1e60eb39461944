"""The plugin's hook: rules for elementwise ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar
    from shardwise.rule import Op, Rule


def _elementwise(op: Op) -> Rule:
    from shardwise_pointwise.elementwise import elementwise_of

    return elementwise_of([op])


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the modules of rules, each imported when an op of its own is first seen."""
    from shardwise_pointwise.index import MODULES

    registry.add_modules(MODULES)
    # Torch registers it when it compiles: an optimizer's addcmul with a tensor for its factor is traced as one.
    registry.add_later("prims::fma", _elementwise)
