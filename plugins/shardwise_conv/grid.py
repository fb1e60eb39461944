"""Sampling a picture at the points of a grid: batch, channels, and the points."""

from __future__ import annotations

import torch

from shardwise.rule import Op, Rule, rule

__all__ = ["RULES"]

aten = torch.ops.aten


def _forward(op: Op, positions: str, points: str) -> Rule:
    return rule(op, f"n c {positions}, n {points} _ -> n c {points}", linear="input")  # but not linear in the points


def _backward(op: Op, positions: str, points: str) -> Rule:
    return rule(
        op,
        f"n c {points}, n c {positions}, n {points} _ -> n c {positions}, n {points} _",
        reduce=dict.fromkeys(["c", *points.split()], "sum"),
        linear="grad_output",
    )


RULES = (
    _forward(aten.grid_sampler_2d.default, "_ _", "h w"),
    _forward(aten.grid_sampler_3d.default, "_ _ _", "t h w"),
    _backward(aten.grid_sampler_2d_backward.default, "_ _", "h w"),
    _backward(aten.grid_sampler_3d_backward.default, "_ _ _", "t h w"),
)
