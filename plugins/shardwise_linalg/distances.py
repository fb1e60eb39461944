"""Distances between the rows of matrices, and the cross product of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.rule import Flow, LocalCall, TensorMeta, like, rule, rule_from, signature
from shardwise_linalg.batches import ops

__all__ = ["RULES"]

# If the call names no method, torch computes Euclidean distances of more rows than this by a matrix product, which is
# less exact (aten/src/ATen/native/Distance.cpp).
ROWS = 25
BY_PRODUCT, BY_DIFFERENCES = 1, 2


def _as_the_whole(local: LocalCall) -> Mapping[str, Any]:
    """The method that torch uses for the whole matrices, for their shards too."""
    if local.arg("compute_mode"):
        return {}
    rows = max(local.arg(name).shape[-2] for name in ("x1", "x2"))
    return {"compute_mode": BY_PRODUCT if rows > ROWS else BY_DIFFERENCES}


def _of_shards(local: LocalCall, *args: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient of a shard; CUDA's kernel gives an empty shard of a batch of one that one."""
    spec = local.outputs[0]
    assert spec is not None
    shape = local.local_shape(spec)
    is_empty = 0 in shape
    result = args[1].new_empty(shape) if is_empty else local.call.op.overloadpacket.default(*args)
    return result if out is None else out.copy_(result)


CDIST = rule(ops("_cdist_forward.default _cdist_forward.out"), "... p _, ... r _ -> ... p r", local_args=_as_the_whole)
EUCLIDEAN = rule(ops("_euclidean_dist.default _euclidean_dist.out"), "... p _, ... r _ -> ... p r")
# "grad", and "grad_output" from torch 2.14 on.
GRAD, PDIST_GRAD = (
    signature(op.default).args[0].name for op in (torch.ops.aten._cdist_backward, torch.ops.aten._pdist_backward)
)
CDIST_BACKWARD = rule(
    ops("_cdist_backward.default _cdist_backward.out"),
    "... p r, ... p _, ... r _, ... p r -> ... p _",
    reduce={"r": "sum"},
    linear=GRAD,
    lowering=_of_shards,
)
PDIST = rule(ops("_pdist_forward.default _pdist_forward.out"), "R -> R")
PDIST_BACKWARD = rule(
    ops("_pdist_backward.default _pdist_backward.out"),
    "R, R, R -> R",
    linear=PDIST_GRAD,
)


@rule_from(ops("linalg_cross.default linalg_cross.out"))
def CROSS(self: TensorMeta, other: TensorMeta, dim: int) -> Flow:
    """All dims but that of the vectors; linear in each operand."""
    return like(self, whole=[dim], linear=("self", "other"))


RULES = (CDIST, EUCLIDEAN, CDIST_BACKWARD, PDIST, PDIST_BACKWARD, CROSS)
