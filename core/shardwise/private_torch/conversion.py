"""How ``module.to(...)`` and parametrizations replace a parameter's values: as torch does it for plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from shardwise.private_torch.parts import find_part

__all__ = ["convert_through_data", "is_converting", "parametrize_through"]

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


def parametrize_through(cls: type, give: Callable[[Any, Any], None]) -> None:
    """Have parametrizations call ``give(tensor, values)`` where a ``cls`` gets other values, as when one is registered.

    A plain tensor keeps its identity there, hooks and graphs included (``tensor.set_(values)``). Torch swaps the
    objects of wrappers with inner tensors, which fails while a graph refers to one; where a parametrization has no
    inverse, it swaps the tensor with itself, after which no graph that is alive then reaches it any more. No public
    function says how a class is parametrized. Without the name torch goes on to swap. A program that asks for swaps
    (``torch.__future__``) gets them.
    """
    sets: Any = find_part("torch.nn.utils.parametrize._maybe_set")
    if sets is None:
        return

    def set_values(dest: Any, src: Any) -> None:
        if isinstance(dest, cls) and not torch.__future__.get_swap_module_params_on_conversion():
            give(dest, src)
        else:
            sets(dest, src)

    torch.nn.utils.parametrize._maybe_set = set_values


def is_converting(call: FrameType | None) -> bool:
    """Whether a call is that of ``module.to(...)`` or its like for one of the module's tensors."""
    return call is not None and call.f_globals.get("__name__") == "torch.nn.modules.module"
