"""Arguments of public functions: whether each is of the kind that the function takes, and what it is if not."""

from __future__ import annotations

from inspect import isroutine
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ArgumentError

__all__ = [
    "check_flag",
    "check_function",
    "check_mesh",
    "check_module",
    "check_path",
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
    elif isinstance(value, (tuple, list, dict)):
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
