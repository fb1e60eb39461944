"""Indices that torch would read as tensors of its own, of a MeshTensor: truth values and lists of numbers."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.composites import replicated_tensor
from shardwise.kernel.engine import started

__all__ = ["PLACES", "is_listless", "is_one_truth", "one_or_none", "with_tensors"]

PLACES = frozenset({int, slice, type(...), type(None)})
"""What torch reads by itself: most indices."""
_LISTS = (list, range)
_NO_NUMBERS = (torch.Tensor, list, tuple, range, slice, type(...), type(None))


def is_one_truth(index: Any) -> bool:
    """Whether it is a truth value, or a MeshTensor of one."""
    kind: Any = type(index)
    return kind is bool or (kind is started.tensor_class and index.dtype is torch.bool and index.dim() == 0)


def is_listless(index: Any) -> bool:
    """Whether it has no list of numbers."""
    if type(index) is tuple:
        return not any(type(part) in _LISTS for part in index)
    return type(index) not in _LISTS


def one_or_none(tensor: Any, index: Any) -> Any:
    """The index, into a new first dim, that one truth value stands for; torch would make a plain tensor."""
    return _numbers(tensor, [0] if index else [])


def with_tensors(tensor: Any, index: Any) -> Any:
    """An index whose lists of numbers are MeshTensors: torch would make plain tensors of the lists.

    The numbers must be the same on every rank, as all numbers that a program passes.
    """
    if type(index) is tuple or any(isinstance(part, _NO_NUMBERS) for part in index):
        # Torch reads a list that holds more than numbers as a tuple.
        return tuple(_numbers(tensor, part) if type(part) in _LISTS else part for part in index)
    return _numbers(tensor, index)


def _numbers(tensor: Any, index: Any) -> Any:
    numbers = torch.tensor(index, device=tensor.device, dtype=None if len(index) else torch.int64)
    if numbers.is_floating_point():  # torch takes the whole numbers in them
        numbers = numbers.to(torch.int64)
    return replicated_tensor(type(tensor), tensor._spec.mesh, numbers)
