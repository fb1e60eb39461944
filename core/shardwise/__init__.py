"""Ordinary PyTorch code on a mesh of devices; every fact about how an op may be sharded comes from a plugin."""

from shardwise.api import distribute_module, distribute_tensor
from shardwise.calibration import calibrate
from shardwise.errors import ShardingError
from shardwise.factories import empty, full, ones, rand, randn, zeros
from shardwise.placements import Partial, Placement, Replicate, Shard
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
    "calibrate",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "zeros",
]
