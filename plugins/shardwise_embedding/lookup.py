"""Look-ups in a table that is sharded by row: each rank answers for its own rows, with -0.0 for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.rule import LocalCall, TensorSpec, neutral

__all__ = ["own_rows", "own_values"]


def own_rows(local: LocalCall, table: TensorSpec, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Which indices name rows of this rank, and all indices relative to its first row."""
    start, count = local.offset(table)[0], local.local_shape(table)[0]
    relative = indices - start
    return (relative >= 0).logical_and_(relative < count), relative


def own_values(local: LocalCall, weight: Tensor, indices: Tensor) -> Tensor:
    """The rows that ``indices`` name, -0.0, which changes no sum, where another rank has them.

    An index that no rank has stays out of bounds, so that it fails here as on one device.
    """
    table = local.spec("weight")
    own, relative = own_rows(local, table, indices)
    valid = (indices >= 0).logical_and_(indices < table.shape[0])
    rows = weight if weight.shape[0] else weight.new_zeros(1, weight.shape[1])
    safe = torch.where(own, relative, torch.where(valid, 0, rows.shape[0]))
    return torch.embedding(rows, safe).masked_fill_(own.logical_not_().unsqueeze(-1), neutral("sum", rows.dtype))
