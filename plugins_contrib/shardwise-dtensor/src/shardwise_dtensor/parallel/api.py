"""``parallelize_module``: a plan of styles, applied to a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_parallel

from shardwise.errors import ShardingError
from shardwise_dtensor.parallel.style import ParallelStyle
from shardwise_dtensor.torch_private import second_copy

__all__ = ["StyleError", "parallelize_module"]

_parallelize = second_copy("torch.distributed.tensor.parallel.api", ParallelStyle=ParallelStyle).parallelize_module


class StyleError(ShardingError, TypeError):
    """A plan of :func:`parallelize_module` holds something else than a style of this package."""


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply styles to a module or to submodules of it, in place; returns the module. Every rank must call this.

    ``parallelize_plan`` is a style for the module itself, or a mapping from names of submodules, in which each part may
    be a shell pattern (``"layers.*.w1"``), to styles. Torch's styles are made for a mesh of one dim: of a larger mesh
    pass one dim, ``mesh["tp"]``. Parameters are scattered from ``src_data_rank`` of that mesh; with ``None`` each rank
    keeps its own. Warns for a name that no submodule has. Raises :class:`StyleError` for a plan with other values, and
    what :func:`shardwise.distribute_tensor` raises.
    """
    if isinstance(parallelize_plan, Mapping):
        parallelize_plan = dict(parallelize_plan)
        for name, style in parallelize_plan.items():
            _check_style(style, f"apply a style to {name!r} of a {type(module).__name__}")
    elif parallelize_plan is not None:
        _check_style(parallelize_plan, f"apply a style to a {type(module).__name__}")
    parallelized: nn.Module = _parallelize(module, device_mesh, parallelize_plan, src_data_rank=src_data_rank)
    return parallelized


def _check_style(style: Any, asked: str) -> None:
    if isinstance(style, ParallelStyle):
        return
    of_torch = not TYPE_CHECKING and isinstance(style, torch_parallel.ParallelStyle)
    name = type(style).__name__
    raise StyleError(
        asked=asked,
        found=f"{name} is a style of torch, which makes DTensors" if of_torch else f"it is a {name}",
        do=f"Import {'it' if of_torch else 'a style, or the base of your own,'} from shardwise_dtensor.parallel.",
        style=style,
    )
