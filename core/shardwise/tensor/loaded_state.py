"""State dicts of whole tensors, loaded with ``assign=True``: they are placed as the tensors that they replace."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from shardwise.engine.decided import in_force
from shardwise.tensor.distribute import distribute_tensor
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_of, name_tensor, tag_by_name

__all__ = ["place_assigned"]


def place_assigned(module: nn.Module) -> None:
    """Have ``load_state_dict(state, assign=True)`` of a module place plain tensors; torch would take them as they are,
    and the module would be whole on every rank. Every rank must call it, as any loading.
    """
    module.register_load_state_dict_pre_hook(_place)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    module.register_load_state_dict_post_hook(_name)  # type: ignore[no-untyped-call]  # the same


def _name(module: nn.Module, _: Any) -> None:
    """A torch hook: called after loading, which may have put other tensors in place of those that had names."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, MeshTensor) and not name_of(tensor):
            name_tensor(tensor, name)
            if in_force.decisions is not None:
                tag_by_name(tensor, in_force.decisions.depth)


def _place(
    module: nn.Module,
    state: MutableMapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_: Any,
) -> None:
    """A torch hook: called with torch's own copy of the state dict before anything is loaded."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in own.items():
        value = state.get(prefix + name)
        if not isinstance(tensor, MeshTensor) or isinstance(value, MeshTensor) or not isinstance(value, torch.Tensor):
            continue
        if value.shape == tensor.shape:  # torch reports another shape
            placed = distribute_tensor(value.detach(), tensor.device_mesh, tensor.placements)
            state[prefix + name] = (
                nn.Parameter(placed, value.requires_grad) if isinstance(value, nn.Parameter) else placed
            )
