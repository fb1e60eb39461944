"""``nn.SyncBatchNorm`` on a mesh: a batch norm, whose batch is the whole one.

The module joins the statistics of ranks that each have a batch of their own. A MeshTensor is the batch of all ranks, so
any batch norm on it takes the statistics of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist
from torch import nn

from shardwise.errors import ArgumentError

__all__ = ["refuse_partial_statistics", "take_whole_batches"]


def _of(module: nn.Module) -> Iterator[tuple[str, nn.SyncBatchNorm]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm))


def refuse_partial_statistics(module: nn.Module) -> None:
    """Raise :class:`ArgumentError` for one with a process group, which joins the statistics of some ranks only."""
    for name, norm in _of(module):
        if norm.process_group not in (None, dist.group.WORLD):
            raise ArgumentError(
                asked="distribute a module",
                found=f"its submodule {name!r} is a SyncBatchNorm with a process group, and on a mesh a batch norm "
                "takes the statistics of the whole batch",
                do="Leave process_group out, or use nn.BatchNorm2d or its like, which is the same on a mesh.",
                argument="module",
            )


def take_whole_batches(module: nn.Module) -> None:
    """Have each ``nn.SyncBatchNorm`` in a module run as the batch norm that it is on one device."""
    for _, norm in _of(module):
        norm.forward = partial(nn.BatchNorm1d.forward, norm)  # type: ignore[method-assign]  # a method would lose it in a pickle
