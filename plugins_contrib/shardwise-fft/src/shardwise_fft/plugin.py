"""The hook of this plugin: light, so that loading all plugins stays cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of the Fourier transforms."""
    from shardwise_fft import rules

    registry.add(*rules.RULES)
