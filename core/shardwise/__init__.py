"""Ordinary PyTorch code on a mesh of devices; every fact about how an op may be sharded comes from a plugin."""

from shardwise import stepping
from shardwise.api import distribute_module, distribute_tensor
from shardwise.errors import ShardingError
from shardwise.factories import empty, full, ones, rand, randn, zeros
from shardwise.placements import Partial, Placement, Replicate, Shard
from shardwise.prefetch import prefetch
from shardwise.spec import TensorMeta, TensorSpec
from shardwise.tensor import MeshTensor

__all__ = [
    "MeshTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardingError",
    "TensorMeta",
    "TensorSpec",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "prefetch",
    "rand",
    "randn",
    "zeros",
]

stepping.install()
