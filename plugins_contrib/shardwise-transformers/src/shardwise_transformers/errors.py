"""What this package refuses, one type per cause."""

from __future__ import annotations

from shardwise.errors import PlacementError, ShardingError

__all__ = ["ModelPlanError", "PlacementStyleError", "StyleError"]


class ModelPlanError(ShardingError):
    """A model has no plan, or a plan does not fit the model or the mesh."""


class StyleError(ModelPlanError):
    """A plan has a style whose placements are not known."""


class PlacementStyleError(PlacementError):
    """No style of transformers says how a parameter lies."""
