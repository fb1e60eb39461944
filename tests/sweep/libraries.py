"""The two libraries behind one interface: how a tensor gets onto a mesh and back, and what a refusal looks like."""

from __future__ import annotations

import torch.distributed.tensor as dtensor
from attrs import frozen
from torch import Tensor

import shardwise
from shardwise.errors import NoRuleError, ShardingError


@frozen
class Library:
    """What a sweep needs of a library; ``refusals`` are the errors that mean that it has no rule."""

    name: str
    tensor: type
    distribute: object
    refusals: tuple
    own: tuple

    def scatter(self, whole, mesh, placements):
        """A leaf on the mesh, of a plain tensor that is the same on all ranks."""
        distributed = self.distribute(whole.detach(), mesh, placements)
        return distributed.requires_grad_(whole.requires_grad)

    def whole(self, value):
        return value.full_tensor() if isinstance(value, self.tensor) else value

    def kind_of(self, error):
        """``no rule``, ``refused`` (another error of the library's own) or ``crash``."""
        if isinstance(error, self.refusals):
            return "no rule"
        return "refused" if self.own and isinstance(error, self.own) else "crash"


LIBRARIES = {
    "shardwise": Library(
        "shardwise", shardwise.MeshTensor, shardwise.distribute_tensor, (NoRuleError,), (ShardingError,)
    ),
    "dtensor": Library("dtensor", dtensor.DTensor, dtensor.distribute_tensor, (NotImplementedError,), ()),
}


def is_tensor(value):
    return isinstance(value, Tensor)
