"""Adapters in the files of peft: whole, as from one device."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from shardwise import MeshTensor
from shardwise_peft.placing import place_adapters

__all__ = ["load", "save"]


def save(model: PeftModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """``model.save_pretrained(folder, **options)`` on the mesh. Every rank must call this; the first rank writes.

    Returns on every rank when the files are there. They are those of one device.
    """
    state = model.state_dict()
    saved = set()
    for adapter in options.get("selected_adapters") or list(model.peft_config):
        embeddings = options.get("save_embedding_layers", "auto")
        part = get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=embeddings)
        saved |= {id(tensor) for tensor in part.values()}
    whole = {name: _whole(tensor) if id(tensor) in saved else tensor for name, tensor in state.items()}
    is_first = dist.get_rank() == 0
    model.save_pretrained(os.fspath(folder), state_dict=whole, is_main_process=is_first, **options)
    dist.barrier()


def load(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> PeftModel:
    """``PeftModel.from_pretrained(model, folder, **options)`` for a placed model: its adapters are placed, too."""
    adapted = PeftModel.from_pretrained(model, os.fspath(folder), **options)
    place_adapters(adapted)
    return adapted


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor().detach() if isinstance(tensor, MeshTensor) else tensor
