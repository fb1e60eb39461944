"""Layer norm and RMS norm: batch dims may be sharded, the normalised dims are whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from shardwise.rule import Call, Flow, Labels, TensorMeta, labels, row_major, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _labels(call: Call) -> Labels:
    ndim = call.args["input"].ndim
    return labels(ndim, range(ndim - len(call.args["normalized_shape"]), ndim), "b")


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
    """Batch dims; mean and rstd, which keep the normalised dims as size 1, follow.

    The notation ``... _*`` cannot say it: the number of normalised dims is an argument, and the weight may be absent.
    """
    names = _labels(call)
    others = [None] * (len(call.operands) - 1)
    return Flow([names, *others], [names])


def _gradients(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Row-major gradients of layer norm, on the CPU."""
    return call.outputs if call.op is aten._fused_rms_norm_backward.default else row_major(call, device_type)


@rule_from(
    [
        aten.native_layer_norm_backward.default,
        aten.native_layer_norm_backward.out,
        aten._fused_rms_norm_backward.default,
    ],
    results=_gradients,
)
def backward(call: Call) -> Flow:
    """Batch dims; the gradients of weight and bias are then partial sums."""
    names = _labels(call)
    follows = ("grad_out", "input", "mean", "rstd")
    return Flow(
        [names if name in follows else None for name in call.operand_names],
        [names, *[None] * (len(call.outputs) - 1)],
        reduce={name: "sum" for name in names if name},
        linear="grad_out",
    )


RULES = (forward, backward)
