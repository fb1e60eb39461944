"""``x.cpu()`` where the mesh has other devices: the whole tensor, plain, on every rank's host.

Programs ask for it to read numbers: for a metric, a log, a file. No part may lie on the host, where a mesh of cards has
no collectives; so the parts are joined on the devices, and each rank copies the whole, as one device does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
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

__all__ = ["cpu", "to"]


def _or_whole(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(of_torch)
    def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return of_torch(tensor, *args, **kwargs)
        except DeviceMismatchError as error:
            caller = cast("FrameType", inspect.currentframe()).f_back
            # A module would hold whole tensors from here on.
            if torch.device(error.device).type != "cpu" or is_converting(caller):
                raise
        if is_saving_on_host(caller):
            return wrap(fresh(tensor._local_tensor).cpu(), tensor._spec)
        return of_torch(_whole(tensor), *args, **kwargs)

    return move


def _whole(tensor: Any) -> torch.Tensor:
    judge_move("copy to the host", "x", tensor._spec, [Replicate()] * tensor._spec.mesh.ndim)
    whole: torch.Tensor = tensor.full_tensor()
    return whole


cpu = _or_whole(torch.Tensor.cpu)
to = _or_whole(torch.Tensor.to)
