"""Ops that need one dim whole: running sums, sorting, medians; and those that need the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.rule import Call, Flow, Rule, rule, rule_from
from shardwise.signature import Op
from shardwise_reduce.dims import ops, reduced_dims

__all__ = ["RULES"]


def _along(of: tuple[Op, ...], partial: Sequence[str] = ()) -> Rule:
    """A rule for ops that work along their argument ``dim``: it is whole, and kept, or gone from the result."""

    def describe(call: Call) -> Flow:
        x, result = call.args["self"], call.outputs[0]
        dim = call.args["dim"] % max(1, x.ndim)
        labels = tuple(None if d == dim else f"d{d}" for d in range(x.ndim))
        kept = result is not None and result.ndim == x.ndim
        made = labels if kept else tuple(label for d, label in enumerate(labels) if d != dim)
        same = result is not None and result.dtype == x.dtype != torch.bool
        return Flow([labels], [made], partial=_exact(partial, x.dtype) if same else ())

    describe.__doc__ = "Any dim but the one that the op runs along." + "".join(f" {row}." for row in partial)
    return rule_from(of)(describe)


def _exact(rows: Sequence[str], dtype: torch.dtype) -> list[str]:
    """Averages of integers are cut off, which does not commute with adding."""
    return [row for row in rows if "avg" not in row or dtype.is_floating_point or dtype.is_complex]


CUMSUM = _along(ops("cumsum.default cumsum_.default cumsum.out"), ["sum -> sum", "avg -> avg"])
CUMPROD = _along(ops("cumprod.default cumprod_.default cumprod.out"), ["product -> product"])
SCAN = _along(ops("cummax.default cummax.out cummin.default cummin.out logcumsumexp.default logcumsumexp.out"))
ORDER = _along(
    ops(
        "sort.default sort.stable sort.values sort.values_stable topk.default topk.values kthvalue.default "
        "kthvalue.values "
        "mode.default mode.values median.dim median.dim_values nanmedian.dim nanmedian.dim_values"
    )
)


@rule_from(ops("renorm.default renorm.out renorm_.default"))
def renorm(call: Call) -> Flow:
    """The dim whose slices are renormalised, each by itself."""
    x = call.args["self"]
    dim = call.args["dim"] % x.ndim
    labels = tuple(f"d{d}" if d == dim else None for d in range(x.ndim))
    return Flow([labels], [labels])


@rule_from(ops("hash_tensor.default hash_tensor.out"))
def HASH(call: Call) -> Flow:
    """Any dim but those that are reduced: no pending kind joins hashes."""
    dims, keepdim = reduced_dims(call), bool(call.args["keepdim"])
    labels = tuple(None if d in dims else f"d{d}" for d in range(call.args["self"].ndim))
    return Flow([labels], [tuple(label for d, label in enumerate(labels) if keepdim or d not in dims)])


WHOLE = rule(ops("median.default median.out nanmedian.default nanmedian.out trace.default trace.out"), "R -> R")
DISTANCE = rule(ops("dist.default dist.out"), "R, R -> R")

RULES = (CUMSUM, CUMPROD, SCAN, ORDER, renorm, HASH, WHOLE, DISTANCE)
