"""Boxes: which are kept, and how much rotated ones have in common."""

from __future__ import annotations

import torch

from shardwise.rule import Flow, TensorMeta, rule, rule_from

__all__ = ["BOX_IOU_ROTATED", "NMS"]

vision = torch.ops.torchvision

# Whether a box is kept depends on all boxes of a higher score, and how many are kept on the data: all is whole.
NMS = rule(vision.nms.default, "R, R -> R")


def _pairs(boxes1: torch.Tensor, boxes2: torch.Tensor) -> torch.Tensor:
    return boxes1.new_empty((boxes1.shape[0], boxes2.shape[0]), dtype=torch.float32)


# torchvision has no kernel of it for the meta device.
@rule_from(vision.box_iou_rotated.default, meta=_pairs)
def BOX_IOU_ROTATED(boxes1: TensorMeta, boxes2: TensorMeta) -> Flow:
    """Each pair by itself."""
    return Flow([("n", None), ("m", None)], [("n", "m")])
