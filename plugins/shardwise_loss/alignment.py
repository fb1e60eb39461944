"""Connectionist temporal classification: each sample aligns by itself, so the batch may be sharded.

Reference: Graves et al., "Connectionist temporal classification", 2006.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.rule import Call, Flow, LocalCall, rule, rule_from, whole

__all__ = ["RULES"]

aten = torch.ops.aten

_BATCHED = 3  # the dims of scores with a batch
_PADDED = 2  # the dims of padded targets; without padding they follow one another in one dim


def _named(local: LocalCall, args: tuple[Any, ...]) -> dict[str, Any]:
    names = [a.name for a in local.call.signature.args]
    named = dict(zip(names, args, strict=False))
    spec = local.spec("targets")
    start, count = local.offset(spec)[0], local.local_shape(spec)[0]
    for name in ("input_lengths", "target_lengths"):
        named[name] = named[name][start : start + count]
    return named


def _aligned(local: LocalCall, *args: Any) -> tuple[Tensor, Tensor]:
    """The losses of this rank's samples; their tables are wide enough for the longest target of all ranks."""
    named, spec = _named(local, args), local.outputs[1]
    assert spec is not None
    scores = named["log_probs"]
    if not named["input_lengths"]:
        return scores.new_zeros(0), scores.new_zeros(local.local_shape(spec))
    losses, table = local.call.op(*named.values())
    return losses, pad(table, (0, spec.shape[-1] - table.shape[-1]))


def _differentiated(local: LocalCall, *args: Any) -> Tensor:
    named = _named(local, args)
    if not named["input_lengths"]:
        return torch.zeros_like(named["log_probs"])
    gradient: Tensor = local.call.op(*named.values())
    return gradient


def _flow(call: Call, outputs: list[Any]) -> Flow:
    """The batch, where targets are padded; the table of dims by name serves the forward and the backward."""
    batched = call.args["log_probs"].ndim == _BATCHED and call.args["targets"].ndim == _PADDED
    if not batched:
        return whole(call)
    dims = {
        "grad": ("n",),
        "log_probs": (None, "n", None),
        "targets": ("n", None),
        "neg_log_likelihood": ("n",),
        "log_alpha": ("n", None, None),
    }
    return Flow([dims[name] for name in call.operand_names], outputs, lowered="*")


@rule_from(aten._ctc_loss.default, lowering=_aligned)
def forward(call: Call) -> Flow:
    """Batch, where targets are padded to one length."""
    return _flow(call, [("n",), ("n", None, None)])


def _like_scores(_: Tensor, scores: Tensor, *__: Any) -> Tensor:
    return scores.new_empty(scores.shape)


@rule_from(aten._ctc_loss_backward.default, lowering=_differentiated, meta=_like_scores)
def backward(call: Call) -> Flow:
    """Batch, where targets are padded to one length."""
    return _flow(call, [(None, "n", None)])


# To know a rank's own lengths, the tensors would have to be read.
WHOLE = rule(aten._ctc_loss.Tensor, "R, R, R, R -> R")


@rule_from(aten._ctc_loss_backward.Tensor, meta=_like_scores)
def whole_backward(call: Call) -> Flow:
    """Whole."""
    return whole(call)


RULES = (forward, backward, WHOLE, whole_backward)
