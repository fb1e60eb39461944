"""Layer norm and RMS norm: batch dims may be sharded, the normalised dims are whole."""

from __future__ import annotations

import torch
from attrs import evolve

from shardwise.rule import Call, Flow, TensorMeta, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten

# The backward is linear in grad_out, its first operand.
LINEAR = ("sum, R, ... -> sum, ...", "avg, R, ... -> avg, ...")


def _labels(call: Call) -> tuple[str | None, ...]:
    batch = call.args["input"].ndim - len(call.args["normalized_shape"])
    return tuple(f"b{d}" if d < batch else None for d in range(call.args["input"].ndim))


def _results(call: Call, device_type: str) -> list[TensorMeta | None]:
    """On the CPU the statistics are in the dtype of the parameters, elsewhere in that of the accumulator."""
    result, *statistics = call.outputs
    if device_type != "cpu" or call.op is aten._fused_rms_norm.default:
        return [result, *statistics]
    weight = call.args["weight"]
    dtype = (call.args["input"] if weight is None else weight).dtype
    return [result, *(None if s is None else evolve(s, dtype=dtype) for s in statistics)]


@rule_from([aten.native_layer_norm.default, aten.native_layer_norm.out, aten._fused_rms_norm.default], results=_results)
def forward(call: Call) -> Flow:
    """Batch dims; mean and rstd, which keep the normalised dims as size 1, follow."""
    labels = _labels(call)
    others = [None] * (len(call.operands) - 1)
    return Flow([labels, *others], [labels])


@rule_from(
    [
        aten.native_layer_norm_backward.default,
        aten.native_layer_norm_backward.out,
        aten._fused_rms_norm_backward.default,
    ]
)
def backward(call: Call) -> Flow:
    """Batch dims; the gradients of weight and bias are then partial sums."""
    labels = _labels(call)
    follows = ("grad_out", "input", "mean", "rstd")
    batch = [label for label in labels if label]
    return Flow(
        [labels if name in follows else None for name in call.operand_names],
        [labels, *[None] * (len(call.outputs) - 1)],
        reduce=dict.fromkeys(batch, "sum"),
        partial=LINEAR,
    )


RULES = (forward, backward)
