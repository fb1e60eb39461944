"""Distances between all pairs of rows: every row meets every other, so they are whole."""

from __future__ import annotations

import torch

from shardwise.rule import rule

__all__ = ["RULES"]

aten = torch.ops.aten

RULES = (
    rule([aten._pdist_forward.default, aten._pdist_forward.out], "R -> R"),
    rule([aten._pdist_backward.default, aten._pdist_backward.out], "R, R, R -> R"),
)
