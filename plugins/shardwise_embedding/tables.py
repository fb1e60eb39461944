"""Look-ups in a table, their backward and the renormalisation of looked-up rows.

A table sharded by row answers for its own rows alone: each rank looks up what it has and leaves zeros for the rest, and
the sum over the ranks is the look-up (masked partial results).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, einop, rule, rule_from
from shardwise.spec import TensorSpec

__all__ = ["RULES"]

aten = torch.ops.aten


def _own(local: LocalCall, table: TensorSpec, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Which indices are of this rank's rows, and all of them relative to its first row."""
    start, count = local.offset(table)[0], local.local_shape(table)[0]
    relative = indices - start
    return (relative >= 0).logical_and_(relative < count), relative


def _masked_lookup(local: LocalCall, weight: Tensor, indices: Tensor, *_: Any, out: Tensor | None = None) -> Tensor:
    table = local.spec("weight")
    own, relative = _own(local, table, indices)
    # An index that no rank has must fail here as it fails on one device, so it is left out of bounds.
    valid = (indices >= 0).logical_and_(indices < table.shape[0])
    rows = weight if weight.shape[0] else weight.new_zeros(1, weight.shape[1])
    safe = torch.where(own, relative, torch.where(valid, 0, rows.shape[0]))
    found = torch.embedding(rows, safe).masked_fill_(own.logical_not_().unsqueeze(-1), 0)
    return found if out is None else out.copy_(found)


EMBEDDING = rule(
    [aten.embedding.default, aten.embedding.out],
    "v d, ... -> ... d",
    reduce={"v": "sum"},
    partial=["*, R -> *"],
    lowering=_masked_lookup,
    lowered=["v"],
)


# -- backward ----------------------------------------------------------------------------------------------------


@rule_from(aten.embedding_dense_backward.default)
def embedding_backward(call: Call) -> Callable[[Call], Flow]:
    """Columns follow; sharded indices leave a pending sum."""
    batch = [f"...{d}" for d in range(call.args["indices"].ndim, 0, -1)]
    # How often an index occurs is a global count.
    counted = call.args["scale_grad_by_freq"]
    return einop(
        "... d, ... -> _ d",
        reduce={} if counted else dict.fromkeys(batch, "sum"),
        replicate=batch if counted else (),
        partial=["sum, R -> sum", "avg, R -> avg"],
    )


# -- renormalisation ---------------------------------------------------------------------------------------------


def _renorm_own(local: LocalCall, table: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    whole = local.spec("self")
    own, relative = _own(local, whole, indices)
    # An index that no rank has must fail here as it fails on one device, so it stays, out of bounds.
    illegal = (indices < 0) | (indices >= whole.shape[0])
    mine = torch.where(own, relative, table.shape[0])[own | illegal]
    renormed: Tensor = aten.embedding_renorm_.default(table, mine, max_norm, norm_type) if mine.numel() else table
    return renormed


RENORM = rule(aten.embedding_renorm_.default, "v _, R -> v _", lowering=_renorm_own)

RULES = (EMBEDDING, embedding_backward, RENORM)
