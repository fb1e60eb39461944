"""The ``shardwise`` command."""

from shardwise.cli.main import main

__all__ = ["main"]
