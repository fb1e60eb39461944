"""Nested arguments and results: the tensors in them, and keys of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["freeze", "tensors_in"]


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
    """Nested lists as tuples, so that they can be keys."""
    return tuple(map(freeze, value)) if isinstance(value, (list, tuple)) else value
