"""Ops that need one dim whole, such as sorting and medians; and those that need the whole tensor."""

from __future__ import annotations

from shardwise.rule import Call, Flow, rule, rule_from
from shardwise_reduce.dims import ops, reduced_dims

__all__ = ["RULES"]


def _along(call: Call) -> Flow:
    """Any dim but the one that the op runs along."""
    x, result = call.args["self"], call.outputs[0]
    dim = call.args["dim"] % max(1, x.ndim)
    labels = tuple(None if d == dim else f"d{d}" for d in range(x.ndim))
    kept = result is not None and result.ndim == x.ndim
    return Flow([labels], [labels if kept else tuple(label for d, label in enumerate(labels) if d != dim)])


ORDER = rule_from(
    ops(
        "sort.default sort.stable sort.values sort.values_stable kthvalue.default kthvalue.values mode.default "
        "mode.values median.dim median.dim_values nanmedian.dim nanmedian.dim_values"
    )
)(_along)


@rule_from(ops("renorm.default renorm.out renorm_.default"))
def renorm(call: Call) -> Flow:
    """The dim whose slices are renormalised, each by itself."""
    x = call.args["self"]
    dim = call.args["dim"] % x.ndim
    labels = tuple(f"d{d}" if d == dim else None for d in range(x.ndim))
    return Flow([labels], [labels])


@rule_from(ops("hash_tensor.default hash_tensor.out"))
def HASH(call: Call) -> Flow:
    """Any dim but those that are reduced: no reduction joins hashes."""
    dims, keepdim = reduced_dims(call), bool(call.args["keepdim"])
    labels = tuple(None if d in dims else f"d{d}" for d in range(call.args["self"].ndim))
    return Flow([labels], [tuple(label for d, label in enumerate(labels) if keepdim or d not in dims)])


WHOLE = rule(ops("median.default median.out nanmedian.default nanmedian.out trace.default trace.out"), "R -> R")
DISTANCE = rule(ops("dist.default dist.out"), "R, R -> R")

RULES = (ORDER, renorm, HASH, WHOLE, DISTANCE)
