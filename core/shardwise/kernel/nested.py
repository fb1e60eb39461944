"""Walks over nested arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["comparable", "freeze", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def freeze(value: Any) -> Any:
    """Nested lists as tuples, which have a hash."""
    return tuple(map(freeze, value)) if isinstance(value, (list, tuple)) else value


def comparable(key: Any) -> Any:
    """A key with each NaN in it, which is not equal to itself, replaced by its text; the same object without any."""
    if type(key) is tuple:
        parts = tuple(map(comparable, key))
        return key if all(a is b for a, b in zip(parts, key, strict=True)) else parts
    return repr(key) if type(key) in (float, complex) and key != key else key  # noqa: PLR0124  # NaN alone is so
