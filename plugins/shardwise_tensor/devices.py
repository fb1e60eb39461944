"""The device of a result: that of the mesh, whatever the call says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.errors import DeviceMismatchError
from shardwise.rule import LocalCall

__all__ = ["stays_on_mesh"]


def stays_on_mesh(local: LocalCall) -> Mapping[str, Any]:
    """Replace no argument; raise :class:`DeviceMismatchError` if the call asks for another device type."""
    device = local.call.args.get("device")
    mesh = next(spec.mesh for spec in local.inputs if spec is not None)
    if device is not None and torch.device(device).type != mesh.device_type:
        raise DeviceMismatchError(
            asked=f"run {local.call.op} with device={str(device)!r}",
            found=f"the tensor lies on a mesh of {mesh.device_type} devices",
            do="Make a mesh of the other devices and distribute full_tensor() over it, or move to_local() itself.",
            op=str(local.call.op),
            device=str(device),
            device_type=mesh.device_type,
        )
    return {}
