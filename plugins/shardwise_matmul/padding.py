"""Padding with a constant."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rule import Flow, TensorMeta, like, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


@rule_from([aten.constant_pad_nd.default, aten.constant_pad_nd.out], static=("value",))
def CONSTANT_PAD(self: TensorMeta, pad: Sequence[int], value: complex = 0) -> Flow:
    """Dims that are not padded pass; so do partials that reduce copies of the value to the value."""
    padded = [self.ndim - 1 - i // 2 for i, width in enumerate(pad) if width != 0]
    kinds = ["avg", "max", "min"]
    kinds += ["sum"] if value == 0 else []
    kinds += ["product"] if value in (0, 1) else []
    return like(self, whole=padded, partial=[f"{kind} -> {kind}" for kind in kinds])


RULES = (CONSTANT_PAD,)
