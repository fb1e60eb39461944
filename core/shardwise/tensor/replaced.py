"""Parameters that ``distribute_module`` has replaced: an optimizer that was made before takes the new ones.

An optimizer holds parameters, and a module that is distributed gets other objects. Without this the optimizer would
step on tensors that nobody uses, and the model would never learn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["note_replaced", "take_new_parameters"]

# Weak in the old parameters: most programs drop them at once, and then there is nothing to look at.
_new_of: Any = WeakIdKeyDictionary()


def note_replaced(old: torch.Tensor, new: MeshTensor) -> None:
    """Note what a parameter was replaced by."""
    _new_of[old] = new


def take_new_parameters(optimizer: Optimizer, place: Any) -> None:
    """Have an optimizer step on the parameters that took the place of its own.

    Its states move with them: ``place(whole, parameter)`` makes a state of a parameter's shape a MeshTensor.
    """
    if not _new_of:
        return
    for group in optimizer.param_groups:
        parameters = group["params"]
        for i, old in enumerate(parameters):
            new = _new_of.get(old)
            if new is None:
                continue
            parameters[i] = new
            if old in optimizer.state:
                optimizer.state[new] = {name: place(v, new) for name, v in optimizer.state.pop(old).items()}
