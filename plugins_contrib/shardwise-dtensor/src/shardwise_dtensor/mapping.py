"""``local_map``: a function of local tensors, called with MeshTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import shardwise
from shardwise import MeshTensor, Placement
from shardwise.errors import PlacementError
from shardwise.rule import check_placements, show_all

__all__ = ["LocalMapError", "local_map"]

Places = Sequence[Placement] | None


class LocalMapError(PlacementError, AssertionError):
    """The placements given to :func:`local_map` do not fit the arguments or the results.

    It is a ``ValueError`` and an ``AssertionError`` as well, which torch raises.
    """


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Places | tuple[Places, ...] = None,
    in_placements: tuple[Places, ...] | None = None,
    in_grad_placements: tuple[Places, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """``func`` with this rank's parts in place of the MeshTensors among its positional arguments; also a decorator.

    ``in_placements`` has an entry per positional argument (lists and dicts flattened), ``None`` for one that is not a
    MeshTensor. An argument with other placements is redistributed if ``redistribute_inputs``, else it is an error.
    ``in_grad_placements`` says how the gradients lie that ``func`` gives for its local arguments, an entry per argument
    (default: as the argument, with partial read as replicated). A replicated weight of which each rank sees another
    part of a batch needs ``Partial()`` there. Keyword arguments are passed as they are.

    Each tensor that ``func`` returns is this rank's part of a MeshTensor on ``device_mesh`` (default: that of the first
    MeshTensor) with ``out_placements``: the placements of one result, or a tuple with an entry per result, ``None`` for
    a result that is not a tensor. Parts must have the same shape on all ranks. Without a MeshTensor among the arguments
    the results are returned as they are. ``func`` runs under ``shardwise.on(None)``: tensors that it makes are local.

    Raises :class:`LocalMapError` for placements that do not fit, and what ``redistribute`` and ``from_local`` raise.
    """
    options = (out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs)
    if func is None:
        return lambda function: partial(_call, function, *options)
    return partial(_call, func, *options)


def _call(
    func: Callable[..., Any],
    out_placements: Any,
    in_placements: tuple[Places, ...] | None,
    in_grad_placements: tuple[Places, ...] | None,
    device_mesh: DeviceMesh | None,
    redistribute_inputs: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    name = getattr(func, "__name__", str(func))
    flat, tree = pytree.tree_flatten(args)
    places = _one_each(in_placements, flat, f"call {name} by local_map", "in_placements")
    grads = _one_each(in_grad_placements, flat, f"call {name} by local_map", "in_grad_placements")
    local = list(flat)
    mesh = device_mesh
    is_mapped = False
    for i, value in enumerate(flat):
        asked = f"pass argument {i} to {name} by local_map"
        if isinstance(value, MeshTensor):
            is_mapped, mesh = True, value.device_mesh if mesh is None else mesh
            placed = value if places is None else _placed(value, places[i], redistribute_inputs, asked)
            local[i] = placed.to_local(grad_placements=None if grads is None else _needed(grads[i], asked, "gradient"))
        elif places is not None and places[i] is not None and not isinstance(value, torch.Tensor):
            raise _no_tensor(asked, value, "in_placements")
    with shardwise.on(None):
        result = func(*pytree.tree_unflatten(local, tree), **kwargs)
    return _on_mesh(name, result, mesh, out_placements) if is_mapped else result


def _one_each(places: Iterable[Places] | None, values: Sequence[Any], asked: str, option: str) -> list[Places] | None:
    """The entries of an option, one for each value; ``None`` without the option."""
    if places is None:
        return None
    entries = list(places)
    if len(entries) != len(values):
        raise LocalMapError(
            asked=asked,
            found=f"{option} has {len(entries)} entries for {len(values)} values (lists and dicts flattened)",
            do="Give one entry for each value, None for what is not a tensor.",
            option=option,
        )
    return entries


def _needed(places: Places, asked: str, of: str = "argument") -> Sequence[Placement]:
    if places is None:
        raise LocalMapError(
            asked=asked,
            found=f"the {of} expects placements, as the argument is a MeshTensor, and its entry is None",
            do="Give its placements, one for each mesh dim.",
        )
    return places


def _placed(tensor: MeshTensor, places: Places, redistribute_inputs: bool, asked: str) -> MeshTensor:
    """An argument with the placements that its entry names."""
    wanted = check_placements(_needed(places, asked), tensor.device_mesh.ndim, tensor.ndim)
    if tensor.placements == wanted:
        return tensor
    if not redistribute_inputs:
        raise LocalMapError(
            asked=asked,
            found=f"it has the placements {show_all(tensor.placements)}, and in_placements says {show_all(wanted)}",
            do="Redistribute it first, or set redistribute_inputs=True.",
            placements=tensor.placements,
            expected=wanted,
        )
    return tensor.redistribute(placements=wanted)


def _on_mesh(name: str, result: Any, mesh: DeviceMesh | None, out_placements: Any) -> Any:
    """The results as MeshTensors."""
    flat, tree = pytree.tree_flatten(result)
    entries = out_placements if isinstance(out_placements, tuple) else (out_placements,)
    places = _one_each(entries, flat, f"return the results of {name} from local_map", "out_placements") or []
    for i, (value, own) in enumerate(zip(flat, places, strict=True)):
        asked = f"return result {i} of {name} from local_map"
        if isinstance(value, MeshTensor):
            raise LocalMapError(
                asked=asked,
                found=f"it is a MeshTensor {show_all(value.placements)}, and a part of this rank is expected",
                do="Return to_local() of it.",
            )
        if isinstance(value, torch.Tensor):
            flat[i] = MeshTensor.from_local(value, mesh, own)
        elif own is not None:
            raise _no_tensor(asked, value, "out_placements")
    return pytree.tree_unflatten(flat, tree)


def _no_tensor(asked: str, value: Any, option: str) -> LocalMapError:
    return LocalMapError(
        asked=asked,
        found=f"it is a {type(value).__name__}, no tensor, and {option} has placements for it",
        do=f"Put None in its place in {option}.",
        option=option,
    )
