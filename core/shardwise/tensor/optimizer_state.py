"""States of an optimizer of placed parameters, in the files of one device: written whole, and placed when loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from shardwise.tensor.distribute import distribute_tensor
from shardwise.tensor.file_writers import asking, whole_on_host
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["attend", "placed_state"]

# The attribute of an optimizer that is attended to. Torch leaves it out of pickles and copies, as it does hooks.
_ATTENDED = "_shardwise_attended"


def attend(optimizer: Optimizer) -> None:
    """Before a step: see to the states of an optimizer whose parameters are placed, from its first step on.

    They are whole where a function asks for them that writes the files of one device, and whole ones that are loaded
    are placed as their parameters. What was loaded before the first step is placed now.
    """
    if _ATTENDED in optimizer.__dict__:
        return
    optimizer.__dict__[_ATTENDED] = True
    optimizer.register_state_dict_post_hook(_make_whole)
    optimizer.register_load_state_dict_post_hook(_place)
    _place(optimizer)


def placed_state(value: Any, parameter: MeshTensor) -> Any:
    """A whole state of a parameter that was replaced, of its shape: the first rank's, as the parameter is."""
    if not _is_whole(value, parameter):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _is_whole(value: Any, parameter: MeshTensor) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, MeshTensor) and value.shape == parameter.shape


@torch.no_grad()
def _place(optimizer: Optimizer) -> None:
    """Place whole states as their parameters. They are plain tensors, which the ranks compare as in any op."""
    for parameter, state in optimizer.state.items():
        # A number may be a tensor of the shape of a 0-dim parameter.
        if isinstance(parameter, MeshTensor) and parameter.ndim and isinstance(state, dict):
            for name, value in state.items():
                if _is_whole(value, parameter):
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _make_whole(_: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """A torch hook: called with a new state dict, whose values are the optimizer's own."""
    writer = asking()
    if writer is None:
        return None
    states: dict[Any, Any] = state["state"]
    placed = [v for s in states.values() if isinstance(s, dict) for v in s.values() if isinstance(v, MeshTensor)]
    writer.meet("the states of an optimizer", placed)
    return {**state, "state": {key: _whole(of_one) for key, of_one in states.items()}}


def _whole(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: whole_on_host(value) if isinstance(value, MeshTensor) else value for name, value in state.items()}
