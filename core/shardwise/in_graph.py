"""Imported while a program is being compiled, for what the import does: see :mod:`shardwise.traceable`."""

from shardwise.traceable import register

__all__: list[str] = []

register()
