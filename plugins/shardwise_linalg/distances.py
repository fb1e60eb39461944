"""Distances between the rows of matrices, and the cross product of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.rule import Flow, LocalCall, TensorMeta, rule, rule_from
from shardwise_linalg.batches import ops

__all__ = ["RULES"]

BILINEAR = ("sum, R -> sum", "R, sum -> sum", "avg, R -> avg", "R, avg -> avg")

# Above that many rows of either matrix, and where it is left to it, torch takes Euclidean distances by way of a
# matrix product, which is less exact (aten/src/ATen/native/Distance.cpp).
ROWS = 25
BY_PRODUCT, BY_DIFFERENCES = 1, 2


def _as_the_whole(local: LocalCall) -> Mapping[str, Any]:
    """The way that torch takes for the whole matrices, for their shards too."""
    if local.arg("compute_mode"):
        return {}
    rows = max(local.arg(name).shape[-2] for name in ("x1", "x2"))
    return {"compute_mode": BY_PRODUCT if rows > ROWS else BY_DIFFERENCES}


CDIST = rule(ops("_cdist_forward.default _cdist_forward.out"), "... p _, ... r _ -> ... p r", local_args=_as_the_whole)
EUCLIDEAN = rule(ops("_euclidean_dist.default _euclidean_dist.out"), "... p _, ... r _ -> ... p r")
CDIST_BACKWARD = rule(
    ops("_cdist_backward.default _cdist_backward.out"),
    "... p r, ... p _, ... r _, ... p r -> ... p _",
    reduce={"r": "sum"},
    partial=["sum, R, R, R -> sum", "avg, R, R, R -> avg"],
)
PDIST = rule(ops("_pdist_forward.default _pdist_forward.out"), "R -> R")
PDIST_BACKWARD = rule(
    ops("_pdist_backward.default _pdist_backward.out"),
    "R, R, R -> R",
    partial=["sum, R, R -> sum", "avg, R, R -> avg"],
)


@rule_from(ops("linalg_cross.default linalg_cross.out"))
def CROSS(self: TensorMeta, other: TensorMeta, dim: int) -> Flow:
    """All dims pass but that of the vectors; bilinear: one operand may be partial."""
    vectors = dim % self.ndim
    labels = [None if d == vectors else f"d{d}" for d in range(self.ndim)]
    return Flow([labels], [labels], partial=BILINEAR)


RULES = (CDIST, EUCLIDEAN, CDIST_BACKWARD, PDIST, PDIST_BACKWARD, CROSS)
