"""Sums, counts, products and means."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, Facts, Flow, LocalCall, rule_from
from shardwise_reduce.dims import accumulator, into, ops, reduction, sums

__all__ = ["RULES"]


def _sums(call: Call) -> tuple[str | Facts, ...]:
    x, result = call.args["self"], call.outputs[0]
    return sums(x.dtype, x.dtype if result is None else result.dtype)


@rule_from(ops("sum.default sum.dim_IntList sum.out sum.IntList_out"))
def sum_(call: Call) -> Flow:
    """Any dim; a reduced one gives a partial sum."""
    return reduction(call, "sum", partial=_sums(call))


@rule_from(ops("nansum.default nansum.out"))
def nansum(call: Call) -> Flow:
    """Any dim; a reduced one gives a partial sum. Leaving NaN out is not linear, so the operand is not partial."""
    return reduction(call, "sum")


@rule_from(ops("count_nonzero.default count_nonzero.dim_IntList count_nonzero.out count_nonzero.dim_IntList_out"))
def count_nonzero(call: Call) -> Flow:
    """Any dim; a reduced one gives a partial sum of counts."""
    return reduction(call, "sum")


@rule_from(ops("prod.default prod.dim_int prod.out prod.int_out"))
def prod(call: Call) -> Flow:
    """Any dim; a reduced one gives a partial product."""
    x, result = call.args["self"].dtype, call.outputs[0]
    same = result is not None and result.dtype == x != torch.bool
    return reduction(call, "product", partial=["product -> product"] if same else [])


# -- means -------------------------------------------------------------------------------------------------------


def _share(
    local: LocalCall, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> torch.Tensor:
    """A rank's share of the mean: its sum, divided by the *global* count. A mean of means is wrong on uneven shards."""
    result = local.outputs[0]
    assert result is not None
    count = local.call.args["self"].numel // max(1, result.tensor_meta.numel)
    total = x.sum(dim, keepdim, dtype=accumulator(result.dtype))
    return into(local, total / count, out)


@rule_from(ops("mean.default mean.dim mean.out mean.dtype_out"), lowering=_share)
def mean(call: Call) -> Flow:
    """Any dim; a reduced one gives a partial sum of shares."""
    return reduction(call, "sum", partial=_sums(call), lowered=True)


RULES = (sum_, nansum, count_nonzero, prod, mean)
