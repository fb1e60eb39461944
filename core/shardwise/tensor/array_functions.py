"""What libraries look up in the package of an array's class: opt_einsum and autoray, for ``contract`` of MeshTensors.

They go by the name of the class's module: ``torch.einsum`` for a tensor, ``shardwise.einsum`` for a MeshTensor. Without
it they take the array for NumPy's. The signatures are NumPy's, which they ask every package for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["einsum", "tensordot", "transpose"]


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """As :func:`torch.einsum`."""
    return torch.einsum(equation, *operands)


def tensordot(a: Tensor, b: Tensor, axes: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """As :func:`torch.tensordot`, which calls the axes dims."""
    result: Tensor = torch.tensordot(a, b, dims=axes)
    return result


def transpose(a: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Without ``axes`` the dims are reversed, as NumPy does."""
    return a.permute(*(range(a.ndim)[::-1] if axes is None else axes))
