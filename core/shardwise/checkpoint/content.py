"""What goes into a checkpoint: modules, optimizers and other objects as nested dicts of tensors and plain values.

The names are those of ``torch.distributed.checkpoint.state_dict``: a parameter has its name in the module, an
optimizer's state the parameter's name. So either package loads what the other one has saved.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.optimizers import as_dict, names_for
from shardwise.comm.contents import octets
from shardwise.errors import CheckpointValueError, RankDisagreementError
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["State", "check_same_on_ranks", "exact_sums", "modules_of", "state_dict_of"]

State = Mapping[str, Any]


def state_dict_of(state: State) -> dict[str, Any]:
    """The state as nested dicts and lists. Tensors are not copied."""
    content = {}
    for name, value in state.items():
        if isinstance(value, Optimizer):
            content[name] = as_dict(value, names_for(name, value, modules_of(state)))
        else:
            content[name] = value.state_dict() if isinstance(value, (nn.Module, Stateful)) else value
    return content


def modules_of(state: State) -> dict[str, nn.Module]:
    """The modules among the state, by name."""
    return {name: value for name, value in state.items() if isinstance(value, nn.Module)}


# -- what may be saved -------------------------------------------------------------------------------------------


def exact_sums(content: State) -> dict[str, int]:
    """Checksums of everything that must be the same on every rank, by name: values, and plain tensors of integers.

    A checkpoint has one copy of all that is not a distributed tensor. Raises :class:`CheckpointValueError` for what it
    cannot hold: a value that ``torch.load(weights_only=True)`` does not give back, a key that is not a string, a
    distributed tensor where torch would not find it.
    """
    sums = {}
    for name, value in _leaves("", content):
        if not isinstance(value, torch.Tensor):
            if _holds_distributed(value):
                raise CheckpointValueError(
                    asked=f"save {name!r}",
                    found="it is a tuple or a set that holds a distributed tensor: only one rank's part would be saved",
                    do="Use a list or a dict in its place.",
                    name=name,
                )
            buffer = io.BytesIO()
            try:
                torch.save(value, buffer)
                buffer.seek(0)
                torch.load(buffer, weights_only=True)
            except Exception as error:
                raise CheckpointValueError(
                    asked=f"save {name!r}, a {type(value).__name__}",
                    found="torch.load(weights_only=True) would refuse it, so that it could not be loaded safely",
                    do="Save plain values (numbers, strings, lists, dicts, tensors), or name the class to "
                    "torch.serialization.add_safe_globals in the programs that save and load it.",
                    name=name,
                ) from error
            sums[name] = zlib.crc32(buffer.getvalue())
        elif not isinstance(value, (MeshTensor, DTensor)) and not value.is_floating_point() and not value.is_complex():
            sums[name] = zlib.crc32(octets(value.cpu()).numpy().tobytes())
    return sums


def check_same_on_ranks(sums: list[dict[str, int]]) -> None:
    """Raise :class:`RankDisagreementError` where the ranks have different values under one name."""
    for name in sorted(set().union(*sums)):
        distinct = [of_rank[name] for of_rank in sums if name in of_rank]
        if len(set(distinct)) > 1:
            raise RankDisagreementError(
                asked=f"save {name!r}",
                found="it is not the same on every rank, and a checkpoint has one value of that name",
                do="Save the value of one rank, or give the value of each rank its own name.",
                name=name,
            )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and values with their names. Like torch, look into mappings, and into lists that hold tensors or
    mappings.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointValueError(
                    asked=f"save {path or 'a state'}",
                    found=f"it has the key {key!r}, and keys would come back as strings",
                    do="Use strings for keys, or save a list of pairs.",
                    name=path,
                )
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and any(map(_is_looked_into, value)):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}.{index}", inner)
    else:
        yield path, value


def _is_looked_into(value: Any) -> bool:
    inside = isinstance(value, list) and any(map(_is_looked_into, value))
    return inside or isinstance(value, (torch.Tensor, Mapping))


def _holds_distributed(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_distributed, value))
    if isinstance(value, Mapping):
        return any(map(_holds_distributed, value.values()))
    return isinstance(value, (MeshTensor, DTensor))
