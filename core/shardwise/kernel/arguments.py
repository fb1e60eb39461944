"""Arguments of public functions: whether each is of the kind that the function takes, and what it is if not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from inspect import isroutine
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardwise.errors import ArgumentError

__all__ = [
    "check_arity",
    "check_dtype",
    "check_flag",
    "check_function",
    "check_mesh",
    "check_module",
    "check_mesh_shape",
    "check_path",
    "check_sizes",
    "check_tensor",
    "kind_of",
    "refuse_argument",
]


def kind_of(value: Any) -> str:
    """What a value is, for a message: ``a tuple``, ``an int``, ``None``, ``the class Shard``, ``the function step``."""
    if value is None or isinstance(value, bool):
        return repr(value)
    name = getattr(value, "__qualname__", "")
    if isinstance(value, type):
        return f"the class {name}"
    if name and isroutine(value):
        return f"the function {name}"
    kind = type(value).__name__
    # By its sound: a uint8, an ndarray.
    return f"{'an' if kind.lower().startswith(('a', 'e', 'i', 'o', 'nd')) else 'a'} {kind}"


def refuse_argument(asked: str, name: str, value: Any, do: str) -> NoReturn:
    """Raise :class:`ArgumentError`: ``name`` is not of the kind that a function takes."""
    raise ArgumentError(asked=asked, found=f"its argument {name!r} is {kind_of(value)}", do=do, argument=name)


def check_tensor(asked: str, value: Any, name: str = "tensor") -> None:
    """Raise :class:`ArgumentError` unless a value is a tensor."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, nn.Module):
        refuse_argument(asked, name, value, "Use distribute_module for the parameters and buffers of a module.")
    if isinstance(value, DeviceMesh):
        refuse_argument(asked, name, value, "Give the tensor first, then the mesh, then the placements.")
    refuse_argument(asked, name, value, f"Give a torch.Tensor, as torch.as_tensor({name}) makes it of numbers.")


def check_mesh(asked: str, value: Any, name: str = "device_mesh") -> None:
    """Raise :class:`ArgumentError` unless a value is a DeviceMesh, or a mesh without processes in its place."""
    if isinstance(value, DeviceMesh) or hasattr(value, "device_type"):
        return
    if isinstance(value, str):
        do = f"Give a DeviceMesh. That of one mesh dim of a larger mesh is mesh[{value!r}]."
    elif isinstance(value, (tuple, list)) and value and all(type(n) is int for n in value):
        do = f'Make the mesh first: init_device_mesh("cpu", {tuple(value)}), or "cuda".'
    elif isinstance(value, (tuple, list, dict, Placement)):
        do = "Give the mesh before the placements, or name them: placements=..."
    else:
        do = 'Give a DeviceMesh, as init_device_mesh("cpu", (4,)) makes it.'
    refuse_argument(asked, name, value, do)


def check_module(asked: str, value: Any, name: str = "module") -> None:
    """Raise :class:`ArgumentError` unless a value is a module."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, type) and issubclass(value, nn.Module):
        do = f"Make a module of it first: {value.__name__}(...)."
    elif isinstance(value, torch.Tensor):
        do = "Use distribute_tensor for a tensor; this is about the parameters and buffers of a module."
    else:
        do = "Give an nn.Module first, then the mesh."
    refuse_argument(asked, name, value, do)


def check_function(asked: str, value: Any, name: str) -> None:
    """Raise :class:`ArgumentError` unless a value is a function, or None for no function."""
    if value is not None and not callable(value):
        refuse_argument(asked, name, value, f"Pass a function as {name}=, or leave it out.")


def check_path(asked: str, value: Any, name: str = "directory") -> None:
    """Raise :class:`ArgumentError` unless a value is the path of a file or of a folder."""
    if not isinstance(value, (str, PathLike)):
        refuse_argument(asked, name, value, f'Give its path, as in {name}="runs/first".')


def check_flag(asked: str, value: Any, name: str) -> None:
    """Raise :class:`ArgumentError` unless a value is True or False: the text "no" would count as True."""
    if type(value) is not bool:
        refuse_argument(asked, name, value, "Give True or False.")


def check_dtype(asked: str, value: Any, name: str) -> None:
    """Raise :class:`ArgumentError` unless a value is a dtype, or None for the one that there is."""
    if value is not None and not isinstance(value, torch.dtype):
        refuse_argument(asked, name, value, "Give a torch.dtype, such as torch.bfloat16.")


def check_sizes(asked: str, value: Any, name: str, example: str) -> None:
    """Raise :class:`ArgumentError` unless a value is a list or a tuple of whole numbers from 0 on."""
    do = f"Give whole numbers from 0 on, as in {example}."
    if not isinstance(value, Sequence) or isinstance(value, str):
        refuse_argument(asked, name, value, do)
    for n in value:
        # A size that a graph leaves open is known to be none of the others.
        if not isinstance(n, torch.SymInt) and (not hasattr(n, "__index__") or isinstance(n, bool) or n < 0):
            raise ArgumentError(asked=asked, found=f"its argument {name!r} has {n!r}", do=do, argument=name)


def check_mesh_shape(asked: str, shape: Any, names: Any) -> None:
    """Raise :class:`ArgumentError` unless these are the sizes of a mesh, and names for its dims or None."""
    do = "Give the size of each mesh dim, from 1 on, as in (2, 4)."
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not shape:
        refuse_argument(asked, "mesh_shape", shape, do) if shape != () else _refuse_mesh_dim(asked, "no sizes", do)
    for size in shape:
        if type(size) is not int or size < 1:
            _refuse_mesh_dim(asked, f"the size {size!r}", do)
    if names is None:
        return
    do = f"Give {len(shape)} different names, as in {('dp', 'tp', 'pp')[: len(shape)]}."
    if not isinstance(names, Sequence) or isinstance(names, str):
        refuse_argument(asked, "mesh_names", names, do)
    if [*map(type, names)] != [str] * len(shape) or len(set(names)) < len(shape):
        found = f"its argument 'mesh_names' is {tuple(names)!r}, and the mesh has the sizes {tuple(shape)}"
        raise ArgumentError(asked=asked, found=found, do=do, argument="mesh_names")


def _refuse_mesh_dim(asked: str, found: str, do: str) -> NoReturn:
    raise ArgumentError(asked=asked, found=f"its argument 'mesh_shape' has {found}", do=do, argument="mesh_shape")


def check_arity(asked: str, function: Any, name: str, takes: Sequence[Sequence[str]]) -> None:
    """Raise :class:`ArgumentError` for a function that can be called with none of these lists of arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return
    for names in takes:
        try:
            signature.bind(*names)
        except TypeError:
            continue
        return
    ways = " or ".join(f"{name}({', '.join(names)})" for names in takes)
    found = f"its argument {name!r} is {kind_of(function)} that takes {signature}"
    raise ArgumentError(asked=asked, found=found, do=f"It is called as {ways}.", argument=name)
