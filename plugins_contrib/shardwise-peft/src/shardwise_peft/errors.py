"""What this package refuses, one type per cause."""

from __future__ import annotations

from shardwise.errors import PlacementError, ShardingError

__all__ = ["AdapterError", "AdapterPlanError"]


class AdapterError(ShardingError):
    """There is no placed model, or no adapter, where one is needed."""


class AdapterPlanError(PlacementError):
    """A pattern fits no tensor of the base model."""
