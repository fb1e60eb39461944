"""``torch.cond`` and ``torch.while_loop`` with MeshTensors: outside of graphs, as Python's ``if`` and ``while``.

Torch runs both in a small graph even where a program compiles nothing, and what merges the branches of that graph knows
no tensors of other classes. A program asks for the predicate's number anyway, so nothing is gained by a graph. In a
compiled program the graph is broken there; with ``fullgraph=True`` torch says so with our reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.nested import tensors_in
from shardwise.private_torch.dispatch import leave_out_of_graphs
from shardwise.private_torch.trees import tree_flatten, tree_map_only, tree_unflatten
from shardwise.tensor.branch_reads import reachable, read_by

__all__ = ["take_control_flow"]


def take_control_flow(cls: type) -> None:
    """Have ``torch.cond`` and ``torch.while_loop`` run in Python where a ``cls`` takes part; all else is torch's."""
    for name, run in (("cond", _cond), ("while_loop", _while_loop)):
        of_torch = vars(torch).get(name)
        if of_torch is not None:
            setattr(torch, name, _taken(cls, of_torch, run))


def _taken(cls: type, of_torch: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(of_torch)
    def function(*args: Any, **kwargs: Any) -> Any:
        takes_part = any(isinstance(tensor, cls) for tensor in tensors_in([args, kwargs]))
        if torch.compiler.is_dynamo_compiling():
            if not takes_part:
                return of_torch(*args, **kwargs)
            from shardwise.tensor.allow_in_graph import in_python

            return in_python(run, *args, **kwargs)
        if takes_part or any(isinstance(tensor, cls) for tensor in reachable([*args, *kwargs.values()])):
            return run(*args, **kwargs)
        return of_torch(*args, **kwargs)

    leave_out_of_graphs(function)
    return function


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    result = (true_fn if _decided(pred, [*operands, true_fn, false_fn]) else false_fn)(*operands)
    if not isinstance(pred, torch.Tensor) or not torch.is_grad_enabled():
        return result  # for a number torch, too, runs one branch and no more
    read = [tensor for tensor in read_by([true_fn, false_fn], operands) if tensor.requires_grad]
    leaves, structure = tree_flatten(result)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not read or not at:
        return result
    outs = _ReadByEither.apply(len(at), *(leaves[i] for i in at), *read)  # type: ignore[no-untyped-call]
    for i, out in zip(at, outs, strict=True):
        leaves[i] = out
    return tree_unflatten(leaves, structure)


class _ReadByEither(torch.autograd.Function):
    """What only the branch that was not taken reads has a gradient of zeros, as torch gives it, and not None.

    An optimizer steps on a parameter with the one, and leaves out a parameter with the other.
    """

    @staticmethod
    def forward(ctx: Any, outs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors[outs:])
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors[:outs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *grads, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors))


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Sequence[Any]) -> Any:
    if not _decided(cond_fn(*carried_inputs), [*carried_inputs, cond_fn, body_fn]):
        return tree_map_only(torch.Tensor, torch.clone, tuple(carried_inputs))
    carried = body_fn(*carried_inputs)
    while _decided(cond_fn(*carried), [*carried, cond_fn, body_fn]):
        carried = body_fn(*carried)
    return carried


def _decided(pred: Any, values: Iterable[Any]) -> bool:
    """A predicate as a truth. It must be the same on every rank: ranks in different branches send different things."""
    if not isinstance(pred, torch.Tensor):
        return bool(pred)
    if pred.numel() != 1:
        raise LayoutError(
            asked=f"choose a branch by a tensor of shape {tuple(pred.shape)}",
            found=f"the predicate has {pred.numel()} elements",
            do="Give torch.cond and torch.while_loop one truth, for example mask.any().",
        )
    if isinstance(pred, tensor_class()):
        return bool(pred)
    on_mesh = next((t for t in reachable(values) if isinstance(t, tensor_class())), None)
    # An op of both compares a plain tensor over the ranks, as the program's policy for plain tensors says.
    return bool(pred) if on_mesh is None else bool(on_mesh.new_zeros((), dtype=torch.bool) | pred.reshape(()))
