"""``model.save_pretrained(folder)`` of a module that lies on a mesh writes the files of one device."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.tensor.file_writers import SAVES_ITSELF, asking, whole_on_host
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["give_whole_to_files"]


def give_whole_to_files(module: nn.Module) -> None:
    """Have the state dict of a module be whole where a function asks that writes a file of weights.

    The same for each submodule that can save itself.
    """
    for submodule in module.modules():
        if submodule is module or hasattr(submodule, SAVES_ITSELF):
            submodule.register_state_dict_post_hook(_make_whole)  # type: ignore[no-untyped-call]


def _make_whole(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Every rank takes part, tensor by tensor. A rank that writes keeps the whole ones in the memory of its host; the
    others have tensors of the same shapes, of one element's memory. Tied tensors stay tied.
    """
    writer = asking()
    if writer is None:
        return
    writer.meet("the weights of a module", (tensor for tensor in state.values() if isinstance(tensor, MeshTensor)))
    names = _named(module, prefix)
    made = {id(names[name]): t for name, t in state.items() if name in names and not isinstance(t, MeshTensor)}
    for name, tensor in state.items():
        if isinstance(tensor, MeshTensor) and name.startswith(prefix):
            which = id(names.get(name, tensor))
            if which not in made:
                made[which] = whole_on_host(tensor, is_kept=writer.is_kept)
            state[name] = made[which]


def _named(module: nn.Module, prefix: str) -> dict[str, Any]:
    """Parameters and buffers as they are; those of a state dict are new objects, also where two are one."""
    named = {f"{prefix}{name}": tensor for name, tensor in module.named_parameters(remove_duplicate=False)}
    return named | {f"{prefix}{name}": tensor for name, tensor in module.named_buffers(remove_duplicate=False)}
