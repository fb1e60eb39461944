"""Position-sensitive pooling: ``ps_roi_align``, ``ps_roi_pool`` and their gradients.

Result channel ``c`` at place ``p`` of a region's grid is pooled from input channel ``(c p)``. So channels may be
sharded between result channels: the channels of one grid stay together. The second result has the number of the input
channel, which the gradient reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, linear, rule_from
from shardwise_torchvision.regions import filled, on_shard, own

__all__ = ["POOL", "POOL_BACKWARD"]

vision = torch.ops.torchvision

# Beside sharded pictures a rank has no result of other ranks' regions, but the same channel numbers as all.
BY_PICTURE = "n, R -> sum, R"


def _channels(call: Call, channels: int) -> tuple[tuple[str, int], tuple[str, int]]:
    grid = call.args["pooled_height"] * call.args["pooled_width"]
    return ("c", channels // grid), ("p", grid)


def _pool(local: LocalCall, pictures: Tensor, rois: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    spec = local.spec("input")
    first_channel = local.offset(spec)[1]
    if not local.sharding(spec, 0):
        pooled, mapping = local.call.op(pictures, rois, *settings)
        return pooled, mapping + first_channel
    numbered, mine = own(local, spec, rois)
    pooled, mapping = local.call.op(on_shard(pictures), numbered, *settings)
    return filled(pooled, mine), mapping + first_channel


def _pool_backward(local: LocalCall, grad: Tensor, rois: Tensor, mapping: Tensor, *settings: Any) -> Tensor:
    result = local.outputs[0]
    assert result is not None
    shape = local.local_shape(result)
    mapping = mapping - local.offset(result)[1]
    if local.sharding(result, 0):
        rois, mine = own(local, result, rois)
        grad = torch.where(mine, grad, 0)
    if not shape[0]:
        return grad.new_zeros(shape)
    gradient: Tensor = local.call.op(grad, rois, mapping, *settings[:-4], *shape)
    return gradient


@rule_from([vision.ps_roi_align.default, vision.ps_roi_pool.default], lowering=_pool)
def POOL(call: Call) -> Flow:
    """Regions, whole grids of channels, or pictures."""
    pictures = ("n", _channels(call, call.args["input"].shape[1]), None, None)
    return Flow(
        [pictures, ("k", None)],
        [("k", "c", None, None)] * 2,
        replicate={"n"},
        partial=[linear("input", results=[0])],
        lowered=("c", BY_PICTURE),
        scattered={"k"},
    )


@rule_from([vision._ps_roi_align_backward.default, vision._ps_roi_pool_backward.default], lowering=_pool_backward)
def POOL_BACKWARD(call: Call) -> Flow:
    """The sum over regions; channels as they are pooled."""
    by_region = ("k", "c", None, None)
    return Flow(
        [by_region, ("k", None), by_region],
        [("n", _channels(call, call.args["channels"]), None, None)],
        reduce={"k": "sum"},
        linear="grad",
        lowered=("*", "R, R, R -> n"),
        scattered={"k"},
    )
