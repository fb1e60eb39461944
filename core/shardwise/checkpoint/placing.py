"""Where a checkpoint is loaded to, and how that becomes the state: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardwise.checkpoint import optimizers
from shardwise.checkpoint.content import State, modules_of, state_dict_of
from shardwise.checkpoint.folder import METADATA
from shardwise.errors import CheckpointFileError
from shardwise.kernel.foreign_files import reason
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["prepared", "put_back", "room_for"]


def room_for(state: State, metadata: Metadata, path: Path) -> dict[str, Any]:
    """A state like this one with memory of its own."""
    modules = modules_of(state)
    content = state_dict_of({name: value for name, value in state.items() if not isinstance(value, Optimizer)})
    room = {name: _like(value) for name, value in content.items()}
    for name, value in state.items():
        if isinstance(value, Optimizer):
            names = optimizers.names_for(name, value, modules)
            with _of_an_optimizer(name, path):
                room[name] = optimizers.room_for(name, value, names, metadata, path)
    return room


def _like(value: Any) -> Any:
    """The same dicts and lists with new tensors; of a module without memory, tensors on the mesh's device."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if isinstance(tensor, MeshTensor) and tensor.is_meta:
            return torch.empty_like(tensor, device=tensor.device_mesh.device_type)
        return torch.empty_like(tensor)
    if isinstance(value, Mapping):
        return {key: _like(inner) for key, inner in value.items()}
    if type(value) is list:
        return [_like(inner) for inner in value]
    return value


Part = Callable[[], None]


def prepared(state: MutableMapping[str, Any], room: Mapping[str, Any], path: Path) -> list[Part]:
    """What is left to do with a loaded room, none of which can fail but in objects with a state of their own: these
    come first.
    """
    modules, own, parts = modules_of(state), list[Part](), list[Part]()
    for name, value in state.items():
        loaded = room[name]
        if isinstance(value, nn.Module):
            parts.append(partial(_into_module, value, loaded))
        elif isinstance(value, Optimizer):
            names = optimizers.names_for(name, value, modules)
            with _of_an_optimizer(name, path):
                taken = optimizers.restored(name, value, names, loaded, path)
            parts.append(partial(value.load_state_dict, taken))
        elif isinstance(value, Stateful):
            own.append(partial(value.load_state_dict, loaded))
        else:
            parts.append(partial(_put, state, name, loaded))
    return [*own, *parts]


def put_back(parts: list[Part]) -> None:
    """Give the state what was loaded."""
    for part in parts:
        part()


def _into_module(module: nn.Module, loaded: dict[str, Any]) -> None:
    # Parameters without memory (on the meta device) are replaced by what was loaded.
    module.load_state_dict(loaded, assign=any(p.is_meta for p in module.parameters()))


@contextmanager
def _of_an_optimizer(name: str, path: Path) -> Iterator[None]:
    """A checkpoint may have anything under an optimizer's name."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointFileError(
            asked=f"load the optimizer {name!r} from {path}",
            found=f"what the checkpoint has under that name is not the state of an optimizer ({reason(error)})",
            do="Load another checkpoint, and look at where this one comes from.",
            path=str(path / METADATA),
            file=METADATA,
        ) from error


def _put(parent: Any, key: Any, loaded: Any) -> None:
    """Replace a value; tensors, dicts and lists of the state stay the objects that they are."""
    there = parent[key]
    if isinstance(there, torch.Tensor) and isinstance(loaded, torch.Tensor):
        there.detach().copy_(loaded)
    elif isinstance(there, MutableMapping) and isinstance(loaded, Mapping):
        for inner in loaded:
            _put(there, inner, loaded[inner])
    elif isinstance(there, list) and isinstance(loaded, list) and len(there) == len(loaded):
        for inner in range(len(loaded)):
            _put(there, inner, loaded[inner])
    else:
        parent[key] = loaded
