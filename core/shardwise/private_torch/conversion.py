"""How ``module.to(...)`` and its like replace a parameter: as torch does it for plain tensors."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from shardwise.private_torch.parts import find_part

__all__ = ["convert_through_data", "is_converting"]

_ASKED = "is_traceable_wrapper_subclass"


def convert_through_data(cls: type) -> None:
    """Have ``nn.Module._apply`` set ``parameter.data`` where a function gave a ``cls``, as for plain tensors.

    It swaps the objects of wrappers with inner tensors, because their ``.data`` would leave the inner tensors behind.
    A swap needs a tensor that nothing else refers to. So it fails while a graph is alive, or that graph's gradients and
    the parameter's attributes are lost. No public function says how a class is converted. Without the name in torch's
    module, torch goes on to swap.
    """
    is_wrapper: Any = find_part(f"torch.nn.modules.module.{_ASKED}")
    if is_wrapper is None:
        return

    def is_swapped(converted: object) -> bool:
        return not isinstance(converted, cls) and bool(is_wrapper(converted))

    vars(torch.nn.modules.module)[_ASKED] = is_swapped


def is_converting(call: FrameType | None) -> bool:
    """Whether a call is that of ``module.to(...)`` or its like for one of the module's tensors."""
    return call is not None and call.f_globals.get("__name__") == "torch.nn.modules.module"
