"""Torch's control flow with MeshTensors: outside of graphs, as Python's ``if``, ``while`` and ``for``.

Torch runs ``torch.cond``, ``torch.while_loop``, ``scan`` and ``map`` in a small graph even where a program compiles
nothing, and what makes that graph knows no tensors of other classes. A program asks for the predicate's number anyway,
so nothing is gained by a graph. In a compiled program the graph is broken there; with ``fullgraph=True`` torch says so
with our reason. ``associative_scan`` has a mode that is made of ops: it needs no break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from inspect import signature
from types import FunctionType
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.nested import tensors_in
from shardwise.private_torch.dispatch import leave_out_of_graphs
from shardwise.private_torch.ops import control_flow
from shardwise.private_torch.trees import tree_flatten, tree_map_only, tree_unflatten
from shardwise.tensor.branch_reads import reachable, read_by

__all__ = ["take_control_flow"]


def take_control_flow(cls: type) -> None:
    """Have torch's functions of control flow run in Python where a ``cls`` takes part; all else is torch's."""
    for name, run in (("cond", _cond), ("while_loop", _while_loop), ("scan", _scan), ("map", _map)):
        _replace(control_flow(name), partial(_taken, cls, run))
    _replace(control_flow("associative_scan"), partial(_generic, cls))


def _replace(function: Any, instead: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Run what ``instead`` makes of a function wherever the function is called.

    By its code, and not by its name: a program may have imported it before shardwise (``from torch import cond``).
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        return  # torch lacks it, or has wrapped it: then its own error says that it knows no tensors of other classes
    of_torch = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    of_torch.__kwdefaults__ = function.__kwdefaults__
    vars(of_torch).update(vars(function))
    of_torch.__doc__, of_torch.__module__ = function.__doc__, function.__module__
    function.__signature__ = signature(function)  # type: ignore[attr-defined]
    function.__defaults__, function.__kwdefaults__ = None, {"_instead": instead(of_torch)}
    function.__code__ = _forward.__code__
    leave_out_of_graphs(function)


def _forward(*args: Any, _instead: Callable[..., Any], **kwargs: Any) -> Any:
    return _instead(*args, **kwargs)


def _generic(cls: type, of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """An associative scan by torch's other mode, which runs ops on tensors: the one for elements is one kernel."""

    @wraps(of_torch)
    def function(
        combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        # Dynamo cannot trace the walk through a function; compiled code gives it what it reads as operands, mostly.
        read = tensors_in([xs]) if torch.compiler.is_compiling() else reachable([xs, combine_fn])
        if any(isinstance(tensor, cls) for tensor in read):
            combine_mode = "generic"
        return of_torch(combine_fn, xs, dim, reverse, combine_mode)

    return function


def _taken(cls: type, run: Callable[..., Any], of_torch: Callable[..., Any]) -> Callable[..., Any]:
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


def _scan(
    combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """The carry goes from slice to slice of ``dim``; what each turn returns beside it is stacked along ``dim``."""
    carry, outs = init, []
    for slices in _turns(xs, dim, reverse=reverse):
        carry, out = combine_fn(carry, slices)
        outs.append(out)
    return (carry, _stacked(outs[::-1] if reverse else outs, dim)) if outs else (init, [])


def _map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    return _stacked([f(slices, *args) for slices in _turns(xs, 0)], 0)


def _turns(xs: Any, dim: int, *, reverse: bool = False) -> Iterator[Any]:
    """The slices of a tree of tensors along a dim, which the first tensor's dims count."""
    leaves, structure = tree_flatten(xs)
    if not leaves:
        return
    dim = dim % leaves[0].ndim
    lengths = {leaf.shape[dim] for leaf in leaves if leaf.ndim > dim}
    if len(lengths) != 1 or 0 in lengths or any(leaf.ndim <= dim for leaf in leaves):
        raise LayoutError(
            asked=f"run a function on each slice of dim {dim} of tensors of shapes {[tuple(x.shape) for x in leaves]}",
            found="they do not have one length there" if 0 not in lengths else "there is no slice",
            do="Give tensors of one length, at least 1, along this dim.",
        )
    by_turn = list(zip(*(leaf.unbind(dim) for leaf in leaves), strict=True))
    yield from (tree_unflatten(slices, structure) for slices in (reversed(by_turn) if reverse else by_turn))


def _stacked(outs: Sequence[Any], dim: int) -> Any:
    """The results of all turns, each leaf stacked along ``dim`` if it has so many dims, else along the first."""
    by_turn = [tree_flatten(out)[0] for out in outs]
    leaves = [torch.stack(parts, dim if dim <= parts[0].ndim else 0) for parts in zip(*by_turn, strict=True)]
    return tree_unflatten(leaves, tree_flatten(outs[0])[1])


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
