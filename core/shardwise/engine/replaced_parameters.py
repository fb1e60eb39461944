"""Parameters that a module had before they were placed, where a program still uses them.

Such a parameter is not in the module any more: it has the values of before, and nobody steps on the gradient that it
gets. On one device it would be the module's own, so the numbers would be wrong.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from attrs import frozen

from shardwise.engine.call_site import users_line
from shardwise.errors import PlainTensorError
from shardwise.kernel.known_tensors import forget_tensor
from shardwise.kernel.signature import Op, op_name
from shardwise.private_torch.dispatch import base_of

__all__ = ["leaves_of", "new_of", "note_replaced", "refuse_replaced", "some_are_left"]


@frozen
class _Replaced:
    old: weakref.ref[torch.Tensor]
    new: Any


# By the id of an old parameter; without it when it dies. Most programs drop them at once, and then there is nothing to
# look at. A plain dict: compiled code reads it in the hook of an optimizer's step, and guards that it is empty.
_new_of: dict[int, _Replaced] = {}
_MOST = 1000  # nodes of autograd's graph that are looked at for one tensor


def note_replaced(old: torch.Tensor, new: Any) -> None:
    """Note what a parameter was replaced by."""
    number = id(old)
    _new_of[number] = _Replaced(weakref.ref(old, lambda _: _new_of.pop(number, None)), new)
    forget_tensor(old)


def new_of(old: torch.Tensor) -> Any:
    """What a parameter was replaced by, or None."""
    found = _new_of.get(id(old)) if _new_of else None
    return None if found is None or found.old() is not old else found.new


def some_are_left() -> bool:
    """Whether anything still holds a parameter that was replaced."""
    return bool(_new_of)


def refuse_replaced(op: Op, name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`PlainTensorError` if an operand is a parameter that was replaced, or was made of one.

    Without gradients it is only a tensor with the values of before, which a program may want to compare with.
    """
    if not _new_of or not tensor.requires_grad or not torch.is_grad_enabled():
        return
    old = next((leaf for leaf in leaves_of(tensor) if new_of(leaf) is not None), None)
    if old is None:
        return
    file, line = users_line()
    raise PlainTensorError(
        asked=f"run {op_name(op)} on MeshTensors ({file}:{line})",
        found=f"its argument {name!r} is a parameter of shape {tuple(old.shape)} that distribute_module has replaced, "
        "or is made of one: it is not in the module any more, and would not learn",
        do="Take the parameter from its module where it is used (module.weight), or keep a list, a closure or a view "
        "of parameters only after distribute_module.",
        op=op_name(op),
        argument=name,
        shape=tuple(old.shape),
    )


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a tensor was made of, as far as the nearest nodes of autograd's graph say."""
    if tensor.grad_fn is None:
        base = base_of(tensor)
        return [tensor] if base is None else [tensor, base]
    leaves = []
    nodes: list[Any] = [tensor.grad_fn]
    seen = set(nodes)
    while nodes and len(seen) < _MOST:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return leaves
