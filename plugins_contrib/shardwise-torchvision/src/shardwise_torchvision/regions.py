"""Pooling of regions: ``roi_align``, ``roi_pool`` and their gradients.

A region names its picture by a number, its first column. Where pictures are sharded, each rank pools the regions of its
own pictures and leaves nothing for the others, so that the results are a partial sum and no feature map is moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Flow, LocalCall, TensorMeta, TensorSpec, neutral, rule, rule_from

__all__ = ["ROI_ALIGN", "ROI_ALIGN_BACKWARD", "ROI_POOL", "ROI_POOL_BACKWARD", "filled", "on_shard", "own"]

vision = torch.ops.torchvision


def own(local: LocalCall, pictures: TensorSpec, rois: Tensor) -> tuple[Tensor, Tensor]:
    """The regions with pictures counted from the first of this rank, and which of them lie in its pictures.

    Regions of other pictures get picture 0; what is computed of them does not count.
    """
    picture = rois[:, 0] - local.offset(pictures)[0]
    mine = (picture >= 0) & (picture < local.local_shape(pictures)[0])
    numbered = torch.cat([torch.where(mine, picture, 0).unsqueeze(1), rois[:, 1:]], 1)
    return numbered, mine.view(-1, 1, 1, 1)


def on_shard(pictures: Tensor) -> Tensor:
    """The pictures of this rank, or an empty one where it has none, for regions that do not count."""
    return pictures if pictures.shape[0] else pictures.new_zeros((1, *pictures.shape[1:]))


def filled(result: Tensor, mine: Tensor) -> Tensor:
    """The results of own regions, and what changes no sum for the others."""
    return result.masked_fill(~mine, neutral("sum", result.dtype))


def _forward(local: LocalCall, pictures: Tensor, rois: Tensor, *settings: Any) -> Tensor | tuple[Tensor, ...]:
    numbered, mine = own(local, local.spec("input"), rois)
    results = local.call.op(on_shard(pictures), numbered, *settings)
    return filled(results, mine) if isinstance(results, Tensor) else tuple(filled(r, mine) for r in results)


def _align_backward(local: LocalCall, grad: Tensor, rois: Tensor, *settings: Any) -> Tensor:
    scale, height, width, *_, sampling_ratio, aligned = settings
    return _backward(local, (grad,), rois, (scale, height, width), (sampling_ratio, aligned))


def _pool_backward(local: LocalCall, grad: Tensor, rois: Tensor, argmax: Tensor, *settings: Any) -> Tensor:
    return _backward(local, (grad, argmax), rois, settings[:3], ())


def _backward(
    local: LocalCall, by_region: tuple[Tensor, ...], rois: Tensor, first: tuple[Any, ...], last: tuple[Any, ...]
) -> Tensor:
    """The gradient of this rank's part of the pictures; ``first`` and ``last`` stand about their sizes."""
    result = local.outputs[0]
    assert result is not None
    shape = local.local_shape(result)
    numbered, mine = own(local, result, rois)
    grad, *others = by_region
    if not shape[0]:
        return grad.new_zeros(shape)
    # In a shard of pictures each region is either of this rank or has no gradient here.
    gradient: Tensor = local.call.op(torch.where(mine, grad, 0), numbered, *others, *first, *shape, *last)
    return gradient


ROI_ALIGN = rule(
    vision.roi_align.default,
    "n c _ _, k _ -> k c _ _",
    reduce={"n": "sum"},
    linear="input",
    lowering={"n": _forward},
    scattered=("k", "c"),
)

# A maximum, so neither it nor its place is linear in the pictures.
ROI_POOL = rule(
    vision.roi_pool.default,
    "n c _ _, k _ -> k c _ _, k c _ _",
    reduce={"n": "sum"},
    lowering={"n": _forward},
    scattered=("k", "c"),
)


BY_REGION = ("k", "c", None, None)


@rule_from(vision._roi_align_backward.default, lowering=_align_backward)
def ROI_ALIGN_BACKWARD(grad: TensorMeta, rois: TensorMeta) -> Flow:
    """The sum over regions; each rank may have the gradient of its own pictures."""
    return _gradient([BY_REGION, ("k", None)], "R, R -> n")


@rule_from(vision._roi_pool_backward.default, lowering=_pool_backward)
def ROI_POOL_BACKWARD(grad: TensorMeta, rois: TensorMeta, argmax: TensorMeta) -> Flow:
    """As that of ``roi_align``."""
    return _gradient([BY_REGION, ("k", None), BY_REGION], "R, R, R -> n")


def _gradient(operands: list[tuple[str | None, ...]], by_picture: str) -> Flow:
    return Flow(
        operands,
        [("n", "c", None, None)],
        reduce={"k": "sum"},
        linear="grad",
        lowered=("*", by_picture),
        scattered=("k", "c"),
    )
