"""Rearrangements between channels and positions: pixel shuffle, channel shuffle, unfold and fold.

They move values without changing them, or add them up (fold), so they are linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.rule import Call, Flow, in_memory_format, like, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _fine(call: Call, fine_height: int, fine_width: int, channels: int, factor: int) -> tuple[tuple[Any, ...], ...]:
    """Dims of the coarse form, with more channels, and of the fine form, with more positions."""
    batch = tuple(f"b{d}" for d in range(call.args["self"].ndim - 3))
    coarse = (*batch, (("c", channels), ("r", factor * factor)), "h", "w")
    fine = (*batch, "c", (("h", fine_height // factor), ("y", factor)), (("w", fine_width // factor), ("x", factor)))
    return coarse, fine


def _batch(labels: Sequence[Any]) -> list[str]:
    """The batch dims: the kernels return a wrong shape for an empty batch."""
    return list(labels[:-3])


@rule_from([aten.pixel_shuffle.default, aten.pixel_shuffle.out], results=in_memory_format)
def pixel_shuffle(call: Call) -> Flow:
    """Batch; channels and positions where the shards are of whole blocks."""
    result = call.outputs[0]
    assert result is not None
    coarse, fine = _fine(call, result.shape[-2], result.shape[-1], result.shape[-3], call.args["upscale_factor"])
    return Flow([coarse], [fine], moves="self", nonempty=_batch(coarse))


@rule_from([aten.pixel_unshuffle.default, aten.pixel_unshuffle.out])
def pixel_unshuffle(call: Call) -> Flow:
    """Batch; channels and positions where the shards are of whole blocks."""
    x = call.args["self"]
    coarse, fine = _fine(call, x.shape[-2], x.shape[-1], x.shape[-3], call.args["downscale_factor"])
    return Flow([fine], [coarse], moves="self", nonempty=_batch(fine))


@rule_from([aten.channel_shuffle.default, aten.channel_shuffle.out], results=in_memory_format)
def channel_shuffle(call: Call) -> Flow:
    """Batch and positions; channels are reordered, so they are whole."""
    return like(call.args["self"], whole=[1], moves="self")


def _folded(call: Call, channels: int, window: int) -> tuple[tuple[Any, ...], ...]:
    """Dims of the picture and of its columns, one per position of the window."""
    batch = ("n",) * (len(call.args["self"].shape) - (3 if call.op in UNFOLDS else 2))
    return (*batch, "c", None, None), (*batch, (("c", channels), ("k", window)), None)


def _window(call: Call) -> int:
    height, width = (tuple(call.args["kernel_size"]) * 2)[:2]
    return int(height * width)


UNFOLDS = (aten.im2col.default, aten.im2col.out)
FOLDS = (aten.col2im.default, aten.col2im.out)


@rule_from(UNFOLDS)
def unfold(call: Call) -> Flow:
    """Batch; channels in even shards."""
    picture, columns = _folded(call, call.args["self"].shape[-3], _window(call))
    # Padding is zero. Zeros are partial sums and averages of zero, but not partial maxima of it.
    return Flow([picture], [columns], linear="self")


@rule_from(FOLDS)
def fold(call: Call) -> Flow:
    """Batch; channels in even shards. Overlapping windows are added up."""
    picture, columns = _folded(call, call.args["self"].shape[-2] // _window(call), _window(call))
    return Flow([columns], [picture], linear="self")


RULES = (pixel_shuffle, pixel_unshuffle, channel_shuffle, unfold, fold)
