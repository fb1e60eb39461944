"""transformers makes a mask for each kind of layer, in the order of a set of their names.

Python hashes text by a seed of the process, so that order differs between ranks that were started each for itself. A
mask of a mesh may send, and ranks that make different masks at one time send what does not fit.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise_transformers.errors import ModelPlanError

__all__ = ["agree_on_order"]


def agree_on_order(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise on every rank if the ranks of a mesh go through the kinds of the model's layers in different orders."""
    kinds = set(_layer_types(model))
    if len(kinds) < 2 or mesh.size() == 1:  # noqa: PLR2004  # one kind has one order
        return
    orders = {tuple(kinds)}
    for dim in range(mesh.ndim):
        parts: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(parts, orders, group=mesh.get_group(dim))
        orders = set().union(*parts)
    if len(orders) > 1:
        raise ModelPlanError(
            asked=f"generate with a {type(model).__name__}",
            found=f"transformers makes a mask for each of {', '.join(sorted(kinds))} in the order of a set, which "
            "differs between the ranks: each hashes text by a seed of its own",
            do="Start every rank with PYTHONHASHSEED=0 in its environment.",
        )


def _layer_types(model: nn.Module) -> list[str]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return list(getattr(text, "layer_types", None) or ())
