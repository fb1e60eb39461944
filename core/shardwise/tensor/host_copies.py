"""The whole tensor on every rank's host: ``x.cpu()`` where the mesh has other devices, and ``x.numpy()``.

Programs ask for them to read numbers: for a metric, a log, a file. No part may lie on the host, where a mesh of cards
has no collectives; so the parts are joined on the devices, and each rank copies the whole, as one device does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch

from shardwise.engine.judging import judge_move
from shardwise.errors import DeviceMismatchError
from shardwise.kernel.placements import Replicate
from shardwise.kernel.results import wrap
from shardwise.kernel.view_copies import fresh
from shardwise.private_torch.conversion import is_converting
from shardwise.private_torch.distributed import is_saving_on_host

__all__ = ["cpu", "numpy", "to"]


def cpu(tensor: Any, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    """On a mesh of CPUs this tensor; else the whole tensor on the host, plain and differentiable, on every rank.

    Under ``torch.autograd.graph.save_on_cpu`` each rank's part is copied. Raises :class:`DeviceMismatchError` for a
    parameter of ``module.cpu()``, which would leave the mesh.
    """
    try:
        return torch.Tensor.cpu(tensor, memory_format=memory_format)
    except DeviceMismatchError as error:
        return _on_host(tensor, error, inspect.currentframe(), torch.Tensor.cpu, memory_format=memory_format)


def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own; to the host as :meth:`cpu` does."""
    try:
        return torch.Tensor.to(tensor, *args, **kwargs)
    except DeviceMismatchError as error:
        return _on_host(tensor, error, inspect.currentframe(), torch.Tensor.to, *args, **kwargs)


def numpy(tensor: Any, *, force: bool = False) -> Any:
    """The whole tensor as a NumPy array, by communication where ranks have parts; every rank has to call it.

    Torch's array has the memory of its tensor. This one is a copy, and to write to it is an error of NumPy; with
    ``force=True`` it may be written. Raises what torch raises for a tensor that requires grad, or is not on a CPU.
    """
    if force:
        tensor = tensor.detach()
    elif tensor.requires_grad:
        return torch.empty(0, requires_grad=True).numpy()  # torch's own error
    judge_move("numpy()", "x", tensor._spec, [Replicate()] * tensor._spec.mesh.ndim)
    array = tensor.full_tensor().numpy(force=force).copy(order="K")
    array.flags.writeable = force
    return array


def _on_host(
    tensor: Any, error: DeviceMismatchError, here: FrameType | None, move: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    caller = cast("FrameType", here).f_back
    if torch.device(error.device).type != "cpu" or is_converting(caller):  # a module would hold whole tensors
        raise error
    if is_saving_on_host(caller):
        return wrap(fresh(tensor._local_tensor).cpu(), tensor._spec)
    judge_move("copy to the host", "x", tensor._spec, [Replicate()] * tensor._spec.mesh.ndim)
    return move(tensor.full_tensor(), *args, **kwargs)
