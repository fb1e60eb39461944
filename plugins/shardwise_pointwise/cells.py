"""One step of a recurrent layer on an accelerator, in one kernel: of each sequence by itself.

The gates of a cell stand beside each other in one dim, so no rank may have a part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten

_BATCH = ("b", None)
_BIASES = ("input_bias", "hidden_bias")
_GRU_STATE = 5  # widths of the hidden state that the kernel keeps for the backward


def _flow(call: Call, results: int, of_biases: int = 0) -> Flow:
    """The batch; the gradient of a bias is a sum over it."""
    inputs = [None if name in _BIASES else _BATCH for name in call.operand_names]
    outputs = [_BATCH] * results + [None] * of_biases
    return Flow(inputs, outputs, reduce={"b": "sum"}, nonempty="b")


def _lstm_on_meta(gates: Tensor, _hidden: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Torch's own shapes for it want biases."""
    return state.new_empty(state.shape), state.new_empty(state.shape), gates.new_empty(gates.shape)


@rule_from(aten._thnn_fused_lstm_cell.default, meta=_lstm_on_meta)
def LSTM(call: Call) -> Flow:
    """Gates b g and state b h -> b h, b h, b g; only b may be sharded."""
    return _flow(call, 3)


@rule_from(aten._thnn_fused_lstm_cell_backward_impl.default)
def LSTM_BACKWARD(call: Call) -> Flow:
    """States b h and gates b g -> b g, b h, g; the gradient of the biases is a partial sum."""
    return _flow(call, 2, 1)


def _gru_on_meta(gates: Tensor, _hidden: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return state.new_empty(state.shape), gates.new_empty((state.shape[0], _GRU_STATE * state.shape[1]))


@rule_from(aten._thnn_fused_gru_cell.default, meta=_gru_on_meta)
def GRU(call: Call) -> Flow:
    """Gates b g and state b h -> b h, b w; only b may be sharded."""
    return _flow(call, 2)


def _gru_backward_on_meta(grad: Tensor, _workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    batch, width = grad.shape
    gates, biases = [(batch, 3 * width)] * 2, [grad.new_empty((3 * width,)) if has_bias else None for _ in range(2)]
    return (*(grad.new_empty(shape) for shape in gates), grad.new_empty(grad.shape), *biases)


@rule_from(aten._thnn_fused_gru_cell_backward.default, meta=_gru_backward_on_meta)
def GRU_BACKWARD(call: Call) -> Flow:
    """Gradient b h and workspace b w -> b g, b g, b h, g, g; the gradients of the biases are partial sums."""
    return _flow(call, 3, 2)


RULES = (LSTM, LSTM_BACKWARD, GRU, GRU_BACKWARD)
