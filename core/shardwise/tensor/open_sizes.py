"""Sizes that vary under ``torch.compile``: how the sizes of a rank's part follow from those of the whole tensor.

A graph is guarded only by the sizes of whole tensors. The sizes of parts differ between ranks, and every rank must
recompile at the same time. So torch does not guard a part's sizes. Where the part enters the graph, its sizes are
written as functions of the whole tensor's sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.modes import outside_modes
from shardwise.private_torch.sizes import (
    is_open,
    let_vary,
    same_symbol,
    varies,
)
from shardwise.private_torch.tracing import retraced

__all__ = ["leave_to_whole", "on_its_own", "tied"]


def leave_to_whole(local: torch.Tensor) -> None:
    """Keep torch from guarding a part's sizes."""
    if type(local) is torch.Tensor:
        let_vary(local, range(local.ndim))


def on_its_own(local: torch.Tensor) -> torch.Tensor:
    """A part that may enter a graph without the whole tensor, which then guards the part's sizes like all others."""
    return local.detach() if varies(local) else local


def tied(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A traced part, with its sizes written as functions of those of the whole tensor."""
    with outside_modes():
        if not any(map(is_open, local.shape)):
            return local
        shape = spec.local_shape()
        if all(map(same_symbol, local.shape, shape)):
            return local  # a size that data decides, computed in this graph: the trace must not lose the tensor
        # The part's strides for these sizes. A symbolic stride is the product of another dim's size and stride.
        old, steps = local.shape, local.stride()

        def stride(dim: int) -> Any:
            if not isinstance(steps[dim], torch.SymInt):
                return steps[dim]
            inner = (d for d in range(local.ndim) if d != dim and same_symbol(steps[dim], old[d] * steps[d]))
            below = next(inner, None)
            return steps[dim] if below is None else shape[below] * stride(below)

        return retraced(local, shape, tuple(map(stride, range(local.ndim))))
