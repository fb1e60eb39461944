"""An optimizer's state by the names of its parameters, and room for the state that a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from shardwise.errors import CheckpointKeyError
from shardwise.kernel.foreign_files import short
from shardwise.tensor.distribute import distribute_tensor
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["as_dict", "names_for", "restored", "room_for"]

Names = dict[torch.Tensor, str]
Path = tuple[str | int, ...]


def names_for(name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> Names:
    """The names of an optimizer's parameters, from the module of the state that has all of them."""
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    for module in modules.values():
        names = {p: n for n, p in reversed(list(module.named_parameters()))}
        if parameters <= names.keys():
            return {p: names[p] for p in parameters}
    raise CheckpointKeyError(
        asked=f"save or load the optimizer {name!r}",
        found=f"no module of the state has all its parameters; the modules are {', '.join(modules) or 'none'}",
        do="Put the module that the optimizer trains into the state, too: the optimizer's state is saved by its names.",
        name=name,
    )


def as_dict(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """The optimizer's state dict with names instead of numbers; without a state if the optimizer has made no step.

    Torch's own function makes a step to get a state. Saving must not make a step.
    """
    saved, order = optimizer.state_dict(), [names[p] for p in _parameters(optimizer)]
    state = {order[i]: of_parameter for i, of_parameter in saved["state"].items() if isinstance(i, int)}
    groups = [{**group, "params": [order[i] for i in group["params"]]} for group in saved["param_groups"]]
    return {"state": state, "param_groups": groups}


def room_for(name: str, optimizer: Optimizer, names: Names, metadata: Metadata, folder: object) -> dict[str, Any]:
    """A state to load an optimizer's checkpoint into, with tensors where the checkpoint has tensors.

    A tensor of the parameter's shape has the parameter's placements, any other one is replicated. So an optimizer can
    be loaded before its first step.
    """
    parameters = {n: p for p, n in names.items()}
    room: dict[str, Any] = {"state": {}, "param_groups": []}
    for key, path in (metadata.planner_data or {}).items():
        if path[0] != name or len(path) < 4:  # noqa: PLR2004  # name, section, parameter or number, entry
            continue
        section, who = path[1], path[2]
        if section == "param_groups":
            _put(room, path[1:], None)
        elif section == "state" and who in parameters:
            stored = metadata.state_dict_metadata[key]
            _put(room, path[1:], _room_for_entry(optimizer, parameters[who], path[3:], stored))
    if not room["param_groups"]:
        tops = sorted({str(path[0]) for path in (metadata.planner_data or {}).values()})
        raise CheckpointKeyError(
            asked=f"load the optimizer {name!r} from {folder}",
            found="the checkpoint has no state of an optimizer under that name; it has "
            f"{short(', '.join(tops)) or 'none'}",
            do="Use the name that it was saved under, with nested dicts (torch: flatten_optimizer_state_dict=False).",
            name=name,
        )
    return room


def _room_for_entry(optimizer: Optimizer, parameter: torch.Tensor, path: Path, saved: Any) -> Any:
    """A tensor for a tensor, None for any other value."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    now = optimizer.state.get(parameter, {}).get(path[0]) if len(path) == 1 else None
    dtype = saved.properties.dtype
    if isinstance(now, torch.Tensor) and now.shape == saved.size and now.dtype == dtype:
        return torch.empty_like(now.detach())
    if parameter.shape == saved.size and parameter.ndim:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    # torch's optimizers move a counter to their device.
    whole = torch.empty(saved.size, dtype=dtype, device=parameter.device if len(saved.size) else "cpu")
    if isinstance(parameter, MeshTensor) and whole.ndim:
        return distribute_tensor(whole, parameter.device_mesh, src_data_rank=None)
    return whole


def _put(root: Any, path: Path, value: Any) -> None:
    """Set a value in nested dicts (by strings) and lists (by numbers), and make those that are missing."""
    here = root
    for key, after in zip(path, [*path[1:], None], strict=True):
        inner = value if after is None else [] if isinstance(after, int) else {}
        if isinstance(key, int):
            here.extend([None] * (key + 1 - len(here)))
            here[key] = inner if here[key] is None else here[key]
        else:
            here.setdefault(key, inner)
        here = here[key]


def restored(
    name: str, optimizer: Optimizer, names: Names, loaded: Mapping[str, Any], folder: object
) -> dict[str, Any]:
    """The loaded state as the optimizer takes it; its groups must have the parameters of the saved groups."""
    number = {names[p]: i for i, p in enumerate(_parameters(optimizer))}
    mine = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    saved = [list(group["params"]) for group in loaded["param_groups"]]
    if list(map(sorted, mine)) != list(map(sorted, saved)):
        raise CheckpointKeyError(
            asked=f"load the optimizer {name!r} with groups of {list(map(len, mine))} parameters from {folder}",
            found=f"the checkpoint has groups of {list(map(len, saved))} parameters, or other parameters in them",
            do="Make the optimizer with the groups that it was saved with.",
            name=name,
        )
    groups = [
        {**group, "params": [number[n] for n in own]} for group, own in zip(loaded["param_groups"], mine, strict=True)
    ]
    state = {number[n]: of_parameter for n, of_parameter in loaded["state"].items()}
    return {"state": state, "param_groups": groups}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
