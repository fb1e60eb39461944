"""The plugin's hook: each rule by the name of its operator. Neither torchvision nor a rule is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardwise.hookspecs import Registrar

# By module, the operators and their rules.
RULES = {
    "boxes": {"nms": "NMS", "box_iou_rotated": "BOX_IOU_ROTATED"},
    "regions": {
        "roi_align": "ROI_ALIGN",
        "_roi_align_backward": "ROI_ALIGN_BACKWARD",
        "roi_pool": "ROI_POOL",
        "_roi_pool_backward": "ROI_POOL_BACKWARD",
    },
    "position_sensitive": {
        "ps_roi_align": "POOL",
        "ps_roi_pool": "POOL",
        "_ps_roi_align_backward": "POOL_BACKWARD",
        "_ps_roi_pool_backward": "POOL_BACKWARD",
    },
    "deformable": {"deform_conv2d": "CONVOLUTION", "_deform_conv2d_backward": "CONVOLUTION_BACKWARD"},
}


@hookimpl
def shardwise_register(registry: Registrar) -> None:
    """Register the rules of this plugin."""
    for module, rules in RULES.items():
        for op, name in rules.items():
            registry.add_later(f"torchvision::{op}", f"shardwise_torchvision.{module}:{name}")
