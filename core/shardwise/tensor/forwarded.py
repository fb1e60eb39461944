"""What a parameter becomes that ``distribute_module`` has replaced: the same object, which stands for the new one.

A program may hold a model's parameters from before: a list for clipping, a closure, an average of weights. Python lets
an object change its class, but not to one with other slots, as a MeshTensor has. So the old object gets a class that
passes on whatever is asked of it: attributes and methods here, torch's functions by ``__torch_function__``. Nothing of
this is in the way of an op on MeshTensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import PlainTensorError
from shardwise.private_torch.dispatch import set_data
from shardwise.private_torch.graph_inputs import compile_instead
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["forward_to"]

_NEW = "_shardwise_new"
_own: Callable[[Any, str], Any] = object.__getattribute__


class Forwarded(torch.Tensor):
    """A tensor that stands for the MeshTensor that has taken its place; made by :func:`forward_to` only."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_with_new(args), **_with_new(kwargs or {}))

    def __getattribute__(self, name: str) -> Any:
        if name == "__torch_function__":  # torch asks the object, to learn whether there is something to call
            return _own(self, name)
        return taken_for(self) if name == _NEW else getattr(taken_for(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(taken_for(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(taken_for(self), name)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(taken_for(self), name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method


# Python looks these up in the class. Where a MeshTensor has none of its own, torch's come here by a torch function.
_OF_A_CLASS = ("__class__", "__init__", "__new__", "__torch_dispatch__", "__torch_function__")
for _name, _value in vars(MeshTensor).items():
    if _name.startswith("__") and callable(_value) and _name not in _OF_A_CLASS:
        setattr(Forwarded, _name, _passed_on(_name))


compile_instead(Forwarded, _NEW)


def _with_new(value: Any) -> Any:
    """Arguments of a torch function with the new tensors in them."""
    if type(value) is Forwarded:
        return taken_for(value)
    if isinstance(value, dict):
        return {name: _with_new(part) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_with_new, value))
    return value


def taken_for(tensor: Any) -> Any:
    """The MeshTensor that a replaced tensor stands for; another tensor as it is."""
    return _own(tensor, "__dict__")[_NEW] if type(tensor) is Forwarded else tensor


def forward_to(old: torch.Tensor, new: MeshTensor) -> None:
    """Have a tensor stand for another from here on, if its class lets it.

    A class with slots stays what it is. The old memory is given up, and
    a gradient that still comes to the old tensor itself, past all that is passed on, is an error.
    """
    if not _may_stand_for_another(old):
        return
    shape: Any = old.shape
    if old.requires_grad:
        hooked: Any = old
        hooked.register_hook(_refusing_gradients(shape))
    if type(old).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # else it is not what holds the memory
        set_data(old, _without_values(shape, new))
    vars(old).clear()
    vars(old)[_NEW] = new
    old.__class__ = Forwarded
    _take_new_when_registered()


def _may_stand_for_another(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    try:
        tensor.__class__ = Forwarded
    except TypeError:
        return False
    object.__setattr__(tensor, "__class__", kind)
    return True


def _without_values(shape: torch.Size, new: MeshTensor) -> torch.Tensor:
    """What takes no memory, and shows itself where something reads it."""
    like: Any = {"dtype": new.dtype, "device": new._local_tensor.device}
    if not (new.dtype.is_floating_point or new.dtype.is_complex):
        return torch.empty(0, **like)
    return torch.full((), math.nan, **like).expand(shape)


def _refusing_gradients(shape: torch.Size) -> Callable[[Any], None]:
    def refuse(_grad: Any) -> None:
        raise PlainTensorError(
            asked=f"bring a gradient to a parameter of shape {tuple(shape)}",
            found="distribute_module has replaced it after a forward pass had used it, or an op below Python has taken "
            "the old parameter, and the module's own would not get this gradient",
            do="Run the backward pass of such a forward pass before distribute_module, and take parameters from their "
            "module where a custom autograd function is called (module.weight).",
            shape=tuple(shape),
        )

    return refuse


def _take_new_when_registered() -> None:
    """Where a module is given a tensor that stands for another, it gets that one: a list of parameters has it once."""
    global _is_hooked  # noqa: PLW0603  # torch keeps such hooks for the process
    if not _is_hooked:
        register_module_parameter_registration_hook(_registered)
        register_module_buffer_registration_hook(_registered)
        _is_hooked = True


_is_hooked = False


def _registered(_module: Any, _name: str, tensor: Any) -> Any:
    return taken_for(tensor) if type(tensor) is Forwarded else None
