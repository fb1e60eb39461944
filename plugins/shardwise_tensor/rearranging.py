"""Elements that change places along some dims, and triangles of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.rule import (
    Call,
    Flow,
    LocalCall,
    TensorMeta,
    dim_of,
    in_memory_format,
    like,
    row_major,
    rule,
    rule_from,
)

__all__ = ["RULES"]

aten = torch.ops.aten


@rule_from([aten.flip.default, aten.flip.out])
def FLIP(x: TensorMeta, dims: Sequence[int]) -> Flow:
    """Every dim passes but the flipped ones."""
    return like(x, whole={dim_of(d, x.ndim) for d in dims}, moves="self")


def _rolled(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """The kernel of the CPU joins parts, which keeps a memory format; without dims, parts of one line."""
    return in_memory_format(call, device_type) if call.args["dims"] else row_major(call, device_type)


@rule_from([aten.roll.default, aten.roll.out], results=_rolled)
def ROLL(x: TensorMeta, shifts: Sequence[int], dims: Sequence[int] = ()) -> Flow:
    """Every dim passes but the rolled ones; without dims the tensor is rolled as one line."""
    return like(x, whole=dims or range(x.ndim), moves="self")


@rule_from([aten.rot90.default, aten.rot90.out])
def ROT90(x: TensorMeta, k: int = 1, dims: Sequence[int] = (0, 1)) -> Flow:
    """Every dim passes but the two of the plane that turns."""
    return like(x, whole=dims, moves="self")


# -- triangles ---------------------------------------------------------------------------------------------------


def _on_own_diagonal(local: LocalCall, x: Tensor, diagonal: int = 0, **out: Tensor) -> Tensor:
    *_, row, column = local.offset(local.spec("self"))
    cut: Tensor = local.call.op(x, diagonal + row - column, **out)
    return cut


# The part that is cut off is zero on every rank, and every reduction of zeros is zero.
TRIANGLE = rule(
    [
        aten.tril.default,
        aten.tril.out,
        aten.tril_.default,
        aten.triu.default,
        aten.triu.out,
        aten.triu_.default,
    ],
    "... -> ...",
    moves="self",
    lowering={("...2", "...1"): _on_own_diagonal},
)

RULES = (FLIP, ROLL, ROT90, TRIANGLE)
