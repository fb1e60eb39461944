"""What a program holds: ``MeshTensor``, and all that makes, moves and steps one."""

from shardwise.engine import shutdown
from shardwise.tensor import dcp_state_dicts, optimizer_step
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["MeshTensor"]

optimizer_step.install()
shutdown.install()
dcp_state_dicts.install()
