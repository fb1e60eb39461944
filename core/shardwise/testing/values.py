"""Values for sample calls: tensors that are the same every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RuleError
from shardwise.kernel.arguments import refuse_argument
from shardwise.kernel.signature import Op, as_op

__all__ = ["DTYPES", "SHAPES", "Sample", "made", "one_op"]

Sample = tuple[Sequence[Any], Mapping[str, Any]]

# Even and uneven over 4, 2 and 3 ranks, empty shards, size-1 and size-0 dims, none at all.
SHAPES: tuple[tuple[int, ...], ...] = ((8, 6), (5, 7), (4, 1, 3), (1, 2), (0, 3), (9,), ())
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def one_op(op: Any, asked: str) -> Op:
    """The overload that is meant by ``op``; raises :class:`RuleError` where none or several are."""
    resolved = as_op(op)
    if resolved is None:
        raise RuleError(
            asked=asked,
            found=f"{op!r} is not one op overload",
            do="Name overloads, as in torch.ops.aten.mm.default, or what torch.library.custom_op returned.",
        )
    return resolved


def made(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A random tensor with values of both signs; the same for the same arguments."""
    if not isinstance(shape, Sequence):
        refuse_argument("make a sample", "shape", shape, "Give the sizes of its dims, as in made((8, 6)).")
    generator = torch.Generator().manual_seed(seed * 7919 + len(shape))
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5  # noqa: PLR2004
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(tuple(shape), generator=generator, dtype=drawn).to(dtype)
    low = 0 if dtype == torch.uint8 else -5
    return torch.randint(low, 6, tuple(shape), generator=generator).to(dtype)
