"""``nn.SyncBatchNorm`` on a mesh: a batch norm, whose batch is the whole one.

The module joins the statistics of ranks that each have a batch of their own. A MeshTensor is the batch of all ranks, so
any batch norm on it takes the statistics of the whole.
"""

from __future__ import annotations

from types import MethodType

import torch.distributed as dist
from torch import nn

from shardwise.errors import ArgumentError

__all__ = ["take_whole_batches"]


def take_whole_batches(module: nn.Module) -> None:
    """Have each ``nn.SyncBatchNorm`` in a module run as the batch norm that it is on one device.

    Raises :class:`ArgumentError` for one with a process group, which joins the statistics of some ranks only.
    """
    for name, submodule in module.named_modules():
        if not isinstance(submodule, nn.SyncBatchNorm):
            continue
        if submodule.process_group not in (None, dist.group.WORLD):
            raise ArgumentError(
                asked="distribute a module",
                found=f"its submodule {name!r} is a SyncBatchNorm with a process group, and on a mesh a batch norm "
                "takes the statistics of the whole batch",
                do="Leave process_group out, or use nn.BatchNorm2d or its like, which is the same on a mesh.",
                argument="module",
            )
        submodule.forward = MethodType(nn.BatchNorm1d.forward, submodule)  # type: ignore[method-assign]
