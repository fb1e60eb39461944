"""What a program holds: ``MeshTensor``, and all that makes, moves and steps one."""

from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["MeshTensor"]
