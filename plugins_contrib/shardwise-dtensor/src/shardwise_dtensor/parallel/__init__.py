"""Tensor parallelism by styles: the names of ``torch.distributed.tensor.parallel``, for MeshTensors.

The styles are torch's own classes with MeshTensor in place of DTensor, so their arguments, their errors and what they
do to a module are torch's. :func:`parallelize_module` and the styles change a module in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import shardwise
from shardwise import MeshTensor, Replicate
from shardwise.errors import ShardingError
from shardwise_dtensor.torch_private import second_copy

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )
else:
    _styles = second_copy(
        "torch.distributed.tensor.parallel.style",
        DTensor=MeshTensor,
        distribute_module=shardwise.distribute_module,
        distribute_tensor=shardwise.distribute_tensor,
    )
    for _name in _styles.__all__:
        getattr(_styles, _name).__module__ = __name__  # where pickle finds it
    ColwiseParallel = _styles.ColwiseParallel
    ParallelStyle = _styles.ParallelStyle
    PrepareModuleInput = _styles.PrepareModuleInput
    PrepareModuleInputOutput = _styles.PrepareModuleInputOutput
    PrepareModuleOutput = _styles.PrepareModuleOutput
    RowwiseParallel = _styles.RowwiseParallel
    SequenceParallel = _styles.SequenceParallel

__all__ = [
    "ParallelStyle",
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
    "StyleError",
    "loss_parallel",
    "parallelize_module",
]

_parallelize = second_copy("torch.distributed.tensor.parallel.api", ParallelStyle=ParallelStyle).parallelize_module


class StyleError(ShardingError, TypeError):
    """A plan of :func:`parallelize_module` holds something else than a style of this module."""


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


# -- the loss --------------------------------------------------------------------------------------------------------


class _WholeLosses(TorchFunctionMode):
    """Makes the losses of ``cross_entropy`` whole on every rank."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not functional.cross_entropy or not isinstance(result, MeshTensor):
            return result
        return result.redistribute(placements=[Replicate() if p.is_partial() else p for p in result.placements])


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Make what ``cross_entropy`` returns a reduced loss, not a partial one, while the context lasts.

    Shardwise computes the loss of scores that are sharded over their classes without gathering them, in or outside of
    this context, on any mesh, and the backward pass needs no context. It leaves a sum over ranks pending where
    ``reduction`` is ``"sum"`` or ``"none"``. In the context it is reduced, as for a DTensor, so that ``to_local()``
    gives the loss.
    """
    with _WholeLosses():
        yield
