"""Functions of other packages that write the files of one device: who they are, and the whole tensors that they get.

Such a function, or one that reads such a file and compares, asks a module or an optimizer for its state dict, and then
reads the memory of each tensor. A part is not the tensor, and where one rank alone writes, the others no longer take
part. So the state dict that it gets is whole already. The functions are known by their names; any other gets
MeshTensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType

import torch

from shardwise.comm.groups import backend_of
from shardwise.comm.rank_failures import all_say
from shardwise.errors import RankDisagreementError
from shardwise.private_torch.fake import is_rehearsing
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["SAVES_ITSELF", "Writer", "asking", "whole_on_host"]

SAVES_ITSELF = "save_pretrained"
"""The name of the method by which models save themselves: of transformers, diffusers, peft and huggingface_hub."""

_IN_PACKAGES = {
    "save_model": ("safetensors", "accelerate"),
    "load_model": ("safetensors",),  # looks for tensors that share memory
    "get_state_dict": ("accelerate",),  # of a model, also where ``save_state`` saves all
    "save_accelerator_state": ("accelerate",),
    "_save_optimizer_and_scheduler": ("transformers",),  # of the Trainer
    "dump_checkpoint": ("lightning", "pytorch_lightning"),  # of its Trainer
    "save_checkpoint": ("lightning", "lightning_fabric"),  # of Fabric
    "_setup_checkpoint": ("ignite",),
}
"""Functions with more common names, and whose they are."""

_WRITES = "save_on_this_rank"
"""What transformers calls whether this rank writes. Its argument, ``is_main_process``, says less: diffusers writes the
weights on the other ranks, too.
"""


class Writer:
    """The call of a function that writes files."""

    def __init__(self, frame: FrameType) -> None:
        self.name = frame.f_code.co_name
        #: Whether this rank writes, as far as the function says it.
        self.is_kept = bool(frame.f_locals.get(_WRITES, True))

    def meet(self, what: str, tensors: Iterable[MeshTensor]) -> None:
        """See to it that every rank is here before the first one takes a part from the others."""
        for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors):
            if mesh.size() == 1 or mesh.get_coordinate() is None or backend_of(mesh) == "fake" or is_rehearsing():
                continue
            try:
                all_say(self.name, what, mesh.mesh.flatten().tolist())
            except RankDisagreementError:
                raise RankDisagreementError(
                    asked=f"{self.name} of {what} on a mesh",
                    found="another rank of the mesh does not take part, and each has a part of them",
                    do=f"Call {self.name} on every rank, not in `if rank == 0`.",
                    differences=(),
                ) from None


def asking() -> Writer | None:
    """The call of a function that writes files, if it is the one that asks for a state dict.

    Distributed checkpoints take MeshTensors, also where such a function saves one.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if name == SAVES_ITSELF or module.partition(".")[0] in _IN_PACKAGES.get(name, ()):
            return Writer(frame)
        if module.startswith("torch.distributed."):
            return None
        frame = frame.f_back
    return None


def whole_on_host(tensor: MeshTensor, *, is_kept: bool = True) -> torch.Tensor:
    """The whole tensor in the memory of the host; one that is not kept has its shape, and memory of one element.

    Every rank takes part.
    """
    whole = tensor.full_tensor().detach()
    return _alone(whole.cpu()) if is_kept else whole.new_zeros(()).expand(whole.shape)


def _alone(whole: torch.Tensor) -> torch.Tensor:
    """With memory that has no other element, as a parameter of one device: how writers tell a tensor from a part."""
    is_all = whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
    return whole if is_all else whole.clone()
