"""Models quantised by torchao on shardwise meshes.

A quantised weight of torchao is a tensor made of others: integers or float8, scales, zero points. On a mesh these are
MeshTensors, and torchao's own code computes with them. :func:`distribute_module` places a model that is quantised
already; ``torchao.quantization.quantize_`` on a placed model needs nothing of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise_torchao.placing import distribute_module, distribute_quantised
    from shardwise_torchao.states import parts, whole

__all__ = ["distribute_module", "distribute_quantised", "parts", "whole"]

_MODULES = {"distribute_module": "placing", "distribute_quantised": "placing", "parts": "states", "whole": "states"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: loading the plugin must not import torchao, which takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
