"""``model.save_pretrained(folder)`` of a module that lies on a mesh writes the files of one device.

A function that writes a file of weights asks the model for its state dict, and then reads the memory of each tensor. A
part is not the tensor, and where one rank alone writes, the others no longer take part. So the state dict that such a
function gets is whole already. The function is known by its name; any other gets MeshTensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise.comm.groups import backend_of
from shardwise.comm.rank_failures import all_say
from shardwise.errors import RankDisagreementError
from shardwise.private_torch.fake import is_rehearsing
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["give_whole_to_files"]

_ANYWHERE = "save_pretrained"
"""The name of the method by which models save themselves: of transformers, diffusers, peft and huggingface_hub."""

_IN_PACKAGES = {"save_model": ("safetensors", "accelerate")}
"""Functions with more common names, and whose they are."""

_WRITES = "save_on_this_rank"
"""What transformers calls whether this rank writes. Its argument, ``is_main_process``, says less: diffusers writes the
weights on the other ranks, too.
"""


def give_whole_to_files(module: nn.Module) -> None:
    """Have the state dict of a module be whole where a function asks that writes a file of weights.

    The same for each submodule that can save itself.
    """
    for submodule in module.modules():
        if submodule is module or hasattr(submodule, _ANYWHERE):
            submodule.register_state_dict_post_hook(_make_whole)  # type: ignore[no-untyped-call]


def _make_whole(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Every rank takes part, tensor by tensor. A rank that writes keeps the whole ones in the memory of its host; the
    others have tensors of the same shapes, of one element's memory. Tied tensors stay tied.
    """
    writer = _asking(inspect.currentframe())
    if writer is None:
        return
    _meet(writer.f_code.co_name, [tensor for tensor in state.values() if isinstance(tensor, MeshTensor)])
    is_kept = writer.f_locals.get(_WRITES, True)
    names = _named(module, prefix)
    made = {id(names[name]): t for name, t in state.items() if name in names and not isinstance(t, MeshTensor)}
    for name, tensor in state.items():
        if isinstance(tensor, MeshTensor) and name.startswith(prefix):
            which = id(names.get(name, tensor))
            if which not in made:
                whole = tensor.full_tensor().detach()
                made[which] = _alone(whole.cpu()) if is_kept else whole.new_zeros(()).expand(whole.shape)
            state[name] = made[which]


def _meet(name: str, tensors: Sequence[MeshTensor]) -> None:
    """See to it that every rank is here before the first one takes a part from the others."""
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors):
        if mesh.size() == 1 or mesh.get_coordinate() is None or backend_of(mesh) == "fake" or is_rehearsing():
            continue
        try:
            all_say(name, "the weights of the model", mesh.mesh.flatten().tolist())
        except RankDisagreementError:
            raise RankDisagreementError(
                asked=f"{name} of a module that lies on a mesh",
                found="another rank of the mesh does not take part, and each has a part of the weights",
                do=f"Call {name} on every rank, not in `if rank == 0`; it writes each file once.",
                differences=(),
            ) from None


def _alone(whole: torch.Tensor) -> torch.Tensor:
    """With memory that has no other element, as a parameter of one device: how writers tell a tensor from a part."""
    is_all = whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
    return whole if is_all else whole.clone()


def _named(module: nn.Module, prefix: str) -> dict[str, Any]:
    """Parameters and buffers as they are; those of a state dict are new objects, also where two are one."""
    named = {f"{prefix}{name}": tensor for name, tensor in module.named_parameters(remove_duplicate=False)}
    return named | {f"{prefix}{name}": tensor for name, tensor in module.named_buffers(remove_duplicate=False)}


def _asking(frame: FrameType | None) -> FrameType | None:
    """The call of a function that writes a file of weights, if it is the one that asks for a state dict.

    Distributed checkpoints take MeshTensors, also where such a function saves one.
    """
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if name == _ANYWHERE or module.partition(".")[0] in _IN_PACKAGES.get(name, ()):
            return frame
        if module.startswith("torch.distributed."):
            return None
        frame = frame.f_back
    return None
