"""Torch's placement of a dim that is sharded inside: public tensors have it, but its class has no public name."""

from __future__ import annotations

from functools import cache

from torch.distributed.tensor import placement_types

from shardwise.private_torch.parts import require

__all__ = ["StridedShard", "strided_shard"]

require(["torch.distributed.tensor.placement_types._StridedShard"], "use shardwise")

#: ``_StridedShard(dim, split_factor=f)``: the dim is split into ``f`` pieces, and each piece over the mesh dim.
StridedShard = placement_types._StridedShard


@cache
def strided_shard(dim: int, split_factor: int) -> StridedShard:
    """``_StridedShard(dim, split_factor=split_factor)``, one object per value."""
    return StridedShard(dim, split_factor=split_factor)
