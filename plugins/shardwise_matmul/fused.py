"""Whole attention and encoder layers in one op, which torch runs in inference: the batch may be sharded."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, Flow, TensorMeta, rule_from, whole

__all__ = ["RULES"]

aten = torch.ops.aten

_SEQUENCES = frozenset({"src", "query", "key", "value"})
# What a mask covers, by ATen's ``mask_type``: pairs of positions, padding by sample, or anything.
_PAIRS, _PADDING = 0, 1


def _results(call: Call, _: str) -> list[TensorMeta | None]:
    """The weights are absent unless the call needs them; the meta device returns an empty tensor."""
    result, weights = call.outputs
    return [result, weights if call.args["need_weights"] else None]


def _batched(call: Call) -> Flow:
    mask, kind = call.args["mask"], call.args["mask_type"]
    if mask is not None and kind not in (_PAIRS, _PADDING):
        return whole(call)
    inputs: list[Any] = []
    for name, meta in zip(call.operand_names, call.operands, strict=True):
        follows = name in _SEQUENCES or (name == "mask" and kind == _PADDING)
        inputs.append(("b", *[None] * (meta.ndim - 1)) if follows and meta is not None else None)
    outputs: list[Any] = [None if meta is None else ("b", *[None] * (meta.ndim - 1)) for meta in call.outputs]
    return Flow(inputs, outputs, nonempty={"b"})


@rule_from(aten._transformer_encoder_layer_fwd.default)
def layer(call: Call) -> Flow:
    """Batch."""
    return _batched(call)


@rule_from(aten._native_multi_head_attention.default, results=_results)
def attention(call: Call) -> Flow:
    """Batch."""
    return _batched(call)


RULES = (layer, attention)
