"""Ops that need one dim whole, such as sorting and medians; and those that need the whole tensor."""

from __future__ import annotations

from shardwise.rule import Call, Flow, TensorMeta, dim_of, labels, like, replaced, rule, rule_from
from shardwise_reduce.dims import ops, reduced_dims, result_labels

__all__ = ["RULES"]


@rule_from(
    ops(
        "sort.default sort.stable sort.values sort.values_stable kthvalue.default kthvalue.values mode.default "
        "mode.values median.dim median.dim_values nanmedian.dim nanmedian.dim_values"
    )
)
def ORDER(call: Call) -> Flow:
    """Any dim but the one that the op runs along."""
    ndim, result = call.args["self"].ndim, call.outputs[0]
    dim = dim_of(call.args["dim"], ndim)
    names = labels(ndim, whole={dim})
    has_dim = result is not None and result.ndim == ndim
    return Flow([names], [names if has_dim else replaced(names, dim)])


@rule_from(ops("renorm.default renorm.out renorm_.default"))
def renorm(self: TensorMeta, *, dim: int) -> Flow:
    """The dim whose slices are renormalised, each by itself."""
    return like(self, whole={*range(self.ndim)} - {dim % self.ndim})


@rule_from(ops("hash_tensor.default hash_tensor.out"))
def HASH(call: Call) -> Flow:
    """Any dim but the reduced ones: no reduction joins hashes."""
    names = labels(call.args["self"].ndim, whole=reduced_dims(call))
    return Flow([names], [result_labels(call, names)])


WHOLE = rule(ops("median.default median.out nanmedian.default nanmedian.out trace.default trace.out"), "R -> R")
DISTANCE = rule(ops("dist.default dist.out"), "R, R -> R")

RULES = (ORDER, renorm, HASH, WHOLE, DISTANCE)
