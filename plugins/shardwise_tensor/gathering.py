"""Elements picked along one dim. If that dim is sharded, each rank picks its own and has zeros for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Flow, LocalCall, TensorMeta, dim_of, labels, neutral, replaced, rule, rule_from
from shardwise_tensor.owning import look_up, never_empty, with_indices_of_the_program

__all__ = ["RULES"]

aten = torch.ops.aten


@with_indices_of_the_program()
def _gather_own(local: LocalCall, x: Tensor, dim: int, index: Tensor, **named: Any) -> Tensor:
    at = dim_of(dim, x.ndim)
    owned = look_up(local, at, index)
    picked: Tensor = local.call.op(never_empty(x, [at]), at, owned.at, **named)
    return picked.masked_fill_(~owned.mine, neutral("sum", picked.dtype))


def _is_empty(x: TensorMeta) -> bool:
    """Whether there is nothing to pick from: the kernel says so, and then every rank must have an index for it."""
    sizes: tuple[Any, ...] = tuple(x.shape)
    return any(not isinstance(n, torch.SymInt) and n == 0 for n in sizes)


@rule_from([aten.gather.default, aten.gather.out], lowering=_gather_own)
def GATHER(x: TensorMeta, dim: int, index: TensorMeta) -> Flow:
    """Other dims together if the index covers them; the index also along the dim; a sharded dim is masked."""
    if x.ndim != index.ndim or not x.ndim or _is_empty(x):
        return Flow([None], [None], moves="self")
    at = dim_of(dim, x.ndim)
    names = labels(x.ndim, {d for d in range(x.ndim) if x.shape[d] != index.shape[d]})
    picked = replaced(names, at, "picked")
    return Flow(
        [replaced(names, at, "cut"), picked],
        [picked],
        reduce={"cut": "sum"},
        moves="self",
        lowered={"cut"},
    )


@with_indices_of_the_program()
def _select_own(local: LocalCall, x: Tensor, dim: int, index: Tensor, **named: Any) -> Tensor:
    at = dim_of(dim, x.ndim)
    owned = look_up(local, at, index.reshape(-1))
    picked: Tensor = local.call.op(never_empty(x, [at]), at, owned.at, **named)
    others = (~owned.mine).view([-1] + [1] * (x.ndim - at - 1))
    return picked.masked_fill_(others, neutral("sum", picked.dtype))


def _selected_on_meta(x: Tensor, dim: int, index: Tensor, **out: Tensor) -> Tensor:
    """Torch's meta function takes an index of any shape."""
    if index.ndim > 1:
        msg = "index_select(): Index is supposed to be a vector"
        raise IndexError(msg)
    picked: Tensor = (aten.index_select.out if out else aten.index_select.default)(x, dim, index, **out)
    return picked


@rule_from([aten.index_select.default, aten.index_select.out], lowering=_select_own, meta=_selected_on_meta)
def INDEX_SELECT(x: TensorMeta, dim: int, index: TensorMeta) -> Flow:
    """Other dims pass; in the result the index's dim replaces the indexed one; a sharded dim is masked."""
    if not x.ndim or _is_empty(x):
        return Flow([None], [None], moves="self")
    at = dim_of(dim, x.ndim)
    names = labels(x.ndim)
    picked = ("picked",) if index.ndim else ()
    return Flow(
        [replaced(names, at, "cut"), picked],
        [replaced(names, at, *(picked or (None,)))],
        reduce={"cut": "sum"},
        moves="self",
        lowered={"cut"},
    )


TAKE = rule([aten.take.default, aten.take.out], "R, ... -> ...", moves="self")

RULES = (GATHER, INDEX_SELECT, TAKE)
