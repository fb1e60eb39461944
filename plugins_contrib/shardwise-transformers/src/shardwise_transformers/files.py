"""The files of ``from_pretrained``: whole, as from one device."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise import MeshTensor

__all__ = ["save"]


def save(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """``model.save_pretrained(folder, **options)`` on the mesh. Every rank must call this; the first rank writes.

    Returns on every rank when the files are there. They are those of one device, and ``from_pretrained`` reads them,
    also on another mesh: place the model again. Tensors are made whole one by one, and the first rank alone keeps them,
    in the memory of its host.
    """
    is_first = dist.get_rank() == 0
    whole: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # which tells what is tied
        if id(tensor) not in names:
            value = tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor
            whole[name] = value.detach().cpu() if is_first else None
        elif is_first:
            whole[name] = whole[names[id(tensor)]]
        names.setdefault(id(tensor), name)
    if is_first:
        write: Any = model.save_pretrained  # of PreTrainedModel
        write(os.fspath(folder), state_dict=whole, **options)
    dist.barrier()
