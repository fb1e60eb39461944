"""What a quantised model on a mesh is made of, to save it: its tensors one by one, or whole as torchao has them."""

from __future__ import annotations

import torch
from torch import nn
from torchao.utils import TorchAOBaseTensor

import shardwise as sw

__all__ = ["parts", "whole"]


def parts(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module's state by name, those of a quantised weight one by one (``"0.weight.scale"``).

    They are the tensors themselves. So ``shardwise.checkpoint`` saves them, each rank its part, and loads into them.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, TorchAOBaseTensor):
            inner, _ = tensor.__tensor_flatten__()
            found |= {f"{name}.{key}": getattr(tensor, key) for key in inner}
        else:
            found[name] = tensor
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without a mesh, gathered; every rank must call this. Of a quantised one torchao's own tensor."""
    if isinstance(tensor, sw.MeshTensor):
        return tensor.full_tensor()
    if not isinstance(tensor, TorchAOBaseTensor):
        return tensor
    names, attributes = tensor.__tensor_flatten__()
    inner = {name: whole(getattr(tensor, name)) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, attributes, tensor.shape, tensor.stride())
    return made
