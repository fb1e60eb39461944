"""Sampling a picture at the points of a grid: batch, channels, and the points."""

from __future__ import annotations

import torch

from shardwise.rule import Op, Rule, rule

__all__ = ["RULES"]

aten = torch.ops.aten

# Linear in the picture; not in the points.
LINEAR = ("sum, R -> sum", "avg, R -> avg")


def _forward(op: Op, positions: str, points: str) -> Rule:
    return rule(op, f"n c {positions}, n {points} _ -> n c {points}", partial=LINEAR)


def _backward(op: Op, positions: str, points: str) -> Rule:
    return rule(
        op,
        f"n c {points}, n c {positions}, n {points} _ -> n c {positions}, n {points} _",
        reduce=dict.fromkeys(["c", *points.split()], "sum"),
        partial=["sum, R, R -> sum, sum", "avg, R, R -> avg, avg"],
    )


RULES = (
    _forward(aten.grid_sampler_2d.default, "_ _", "h w"),
    _forward(aten.grid_sampler_3d.default, "_ _ _", "t h w"),
    _backward(aten.grid_sampler_2d_backward.default, "_ _", "h w"),
    _backward(aten.grid_sampler_3d_backward.default, "_ _ _", "t h w"),
)
