"""Ops whose gradient compares an operand with the result get their partial operands reduced, above autograd.

The gradient of a maximum goes to the elements that equal it. Autograd saves the operand and the result. If the operand
is partial, forward and backward each reduce it, maybe by different paths whose sums round differently. Then no element
equals the result. So it is reduced once, and the reduced copy is what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from shardwise.engine.judging import judge_move
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.placements import REPLICATE, Partial
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.private_torch.dispatch import put_above_autograd

__all__ = ["reduce_first"]

# Their reductions take a part as it is, so every path gives the same.
_EXACT = ("max", "min")


def reduce_first(op: Op, tensor_class: type, compared: Callable[[], Collection[Op]]) -> object:
    """Reduce the partial operands of an op if a gradient will be computed, until the returned object is deleted.

    ``compared()`` are the ops for which this holds now.
    """
    written = [arg.written for arg in signature(op).args]

    def run(below: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not torch.is_grad_enabled() or op not in compared():
            return below(*args, **kwargs)
        if not any(isinstance(t, tensor_class) and t.requires_grad for t in tensors_in([args, kwargs])):
            return below(*args, **kwargs)
        # What is written stays the tensor that it is. Torch takes it by position, or as out=, which has no gradient.
        names = [arg.name for arg in signature(op).args]
        reduced = [
            v if is_out else _reduced(op, name, v, tensor_class)
            for name, v, is_out in zip(names, args, written, strict=False)
        ]
        return below(*reduced, **{name: _reduced(op, name, value, tensor_class) for name, value in kwargs.items()})

    return put_above_autograd(op, run)


def _reduced(op: Op, name: str, value: Any, tensor_class: type) -> Any:
    if isinstance(value, (list, tuple)):
        return [_reduced(op, f"{name}[{i}]", part, tensor_class) for i, part in enumerate(value)]
    if not isinstance(value, tensor_class):
        return value
    tensor: Any = value
    placements = [REPLICATE if _rounds(placement) else placement for placement in tensor.placements]
    judge_move(op_name(op), name, tensor._spec, placements)
    return tensor.redistribute(placements=placements)


def _rounds(placement: Any) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op not in _EXACT
