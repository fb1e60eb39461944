"""The names of ``torch.distributed.tensor.experimental``, for MeshTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import shardwise
from shardwise_dtensor.acceptable import register_sharding
from shardwise_dtensor.mapping import LocalMapError, local_map

__all__ = ["LocalMapError", "implicit_replication", "local_map", "register_sharding"]


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Count plain tensors as replicated, while the context lasts, without comparing them.

    The same as ``shardwise.plain("replicate")``. Outside of it they count as replicated too, once the ranks have
    compared them. Plain tensors that differ between ranks give wrong numbers here.
    """
    with shardwise.plain("replicate"):
        yield
