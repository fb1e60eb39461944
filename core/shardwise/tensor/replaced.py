"""Parameters that ``distribute_module`` has replaced: an optimizer that was made before takes the new ones.

An optimizer holds parameters, and a module that is distributed gets other objects. Without this the optimizer would
step on tensors that nobody uses, and the model would never learn. What a program has attached to a parameter, hooks and
attributes, moves to the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from shardwise.engine.replaced_parameters import new_of, note_replaced, some_are_left
from shardwise.private_torch.autograd_nodes import hooks_of
from shardwise.tensor.forwarded import forward_to

__all__ = ["replace", "replace_in_attributes", "take_new_parameters"]

_OURS = ("_spec", "_local_tensor", "_shardwise")  # how attributes begin that say how a MeshTensor lies
_OURS_TOO = (  # hooks that give a gradient its layout, or refuse it
    "shardwise.tensor.leaf_grads",
    "shardwise.engine.plain_tensors",
    "shardwise.tensor.forwarded",
)


def replace(old: torch.Tensor, new: Any) -> None:
    """Have a new parameter stand where an old one did: in what was attached to it, and for those who hold it."""
    _attach_as_before(old, new)
    note_replaced(old, new)
    forward_to(old, new)


def _attach_as_before(old: torch.Tensor, new: Any) -> None:
    """Give a parameter the hooks on the gradient of the one that it replaces, and the attributes that others set."""
    for name, value in vars(old).items():
        if not name.startswith(_OURS):
            setattr(new, name, value)
    before, after = hooks_of(old)
    if not after and not any(map(_is_the_programs, before.values())):
        return
    requires_grad = new.requires_grad
    new.requires_grad_()  # torch refuses hooks on a tensor that is frozen for now
    if before:
        new.register_hook(_in_turn(before))
    if after:
        new.register_post_accumulate_grad_hook(_each(after))
    new.requires_grad_(requires_grad)


def _is_the_programs(hook: Any) -> bool:
    return getattr(hook, "__module__", None) not in _OURS_TOO


def _in_turn(hooks: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The hooks on a gradient as one. It reads torch's dict each time: a handle may remove a hook later."""

    def run(grad: Any) -> Any:
        for hook in filter(_is_the_programs, tuple(hooks.values())):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        return grad

    return run


def _each(hooks: Mapping[int, Callable[[Any], None]]) -> Callable[[Any], None]:
    def run(parameter: Any) -> None:
        for hook in tuple(hooks.values()):
            hook(parameter)

    return run


def take_new_parameters(optimizer: Optimizer, place: Any) -> None:
    """Have an optimizer step on the parameters that took the place of its own.

    Its states move with them: ``place(whole, parameter)`` makes a state of a parameter's shape a MeshTensor.
    """
    for group in optimizer.param_groups:
        parameters = group["params"]
        for i, old in enumerate(parameters):
            new = new_of(old)
            if new is None:
                continue
            parameters[i] = new
            if old in optimizer.state:
                optimizer.state[new] = {name: place(v, new) for name, v in optimizer.state.pop(old).items()}


def replace_in_attributes(module: nn.Module) -> None:
    """Put the new parameters where modules keep the old ones beside their own: in lists, tuples, dicts, attributes."""
    if not some_are_left():
        return
    for submodule in module.modules():
        attributes = vars(submodule)
        for name in attributes.keys() - {"_parameters", "_buffers", "_modules"}:
            attributes[name] = _with_new(attributes[name])


def _with_new(value: Any, depth: int = 3) -> Any:
    """A value with the new parameters in it; lists and dicts stay the objects that they are."""
    if isinstance(value, torch.Tensor):
        new = new_of(value)
        return value if new is None else new
    if not depth or (type(value) not in (list, tuple) and not isinstance(value, dict)):
        return value
    places = value if isinstance(value, dict) else range(len(value))
    changed = {at: new for at in places if (new := _with_new(value[at], depth - 1)) is not value[at]}
    if changed and isinstance(value, tuple):
        return tuple(changed.get(at, part) for at, part in enumerate(value))
    for at, new in changed.items():
        value[at] = new
    return value
