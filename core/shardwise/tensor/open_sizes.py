"""Sizes that vary under ``torch.compile``: how those of a rank's part follow from those of the whole tensor.

A graph is guarded by the sizes of whole tensors alone. Those of parts differ between ranks, and a rank that made a
graph anew by itself would be alone with it. So a part's sizes are left open where torch notes what a graph depends on,
and are written as functions of the whole's where the part comes into the graph.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.kernel.spec import TensorSpec
from shardwise.private_torch.tracing import is_open, let_vary, outside_modes, retraced, same_symbol

__all__ = ["leave_to_whole", "tied"]


def leave_to_whole(local: torch.Tensor) -> None:
    """Have torch note nothing of a part's sizes."""
    if type(local) is torch.Tensor:
        let_vary(local, range(local.ndim))


def tied(local: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A traced part, its sizes written in those of the whole."""
    with outside_modes():
        if not any(map(is_open, local.shape)):
            return local
        shape = spec.local_shape()
        return retraced(local, shape, _strides(local, shape))


def _strides(local: torch.Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part's strides for other sizes: torch writes a stride that is not fixed as another dim's extent."""
    old, steps = local.shape, local.stride()

    def stride(dim: int) -> Any:
        if not isinstance(steps[dim], torch.SymInt):
            return steps[dim]
        inner = (d for d in range(local.ndim) if d != dim and same_symbol(steps[dim], old[d] * steps[d]))
        below = next(inner, None)
        return steps[dim] if below is None else shape[below] * stride(below)

    return tuple(map(stride, range(local.ndim)))
