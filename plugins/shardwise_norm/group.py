"""Group norm: the batch may be sharded, and the channels by whole groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _local_sizes(local: LocalCall) -> Mapping[str, int]:
    """The op's arguments for sizes, for this rank's shard."""
    spec = local.spec("input")
    shape = local.local_shape(spec)
    return {"N": shape[0], "C": shape[1], "group": local.arg("group") // spec.shards_per_dim[1]}


def _dims(call: Call) -> dict[str, tuple[Any, ...]]:
    """Dims of each operand by its name."""
    x, groups = call.args["input"], call.args["group"]
    channel = (("g", groups), ("c", x.shape[1] // groups))
    whole = ("n", channel, *[None] * (x.ndim - 2))
    return {
        "input": whole,
        "grad_out": whole,
        "weight": (channel,),
        "bias": (channel,),
        "mean": ("n", "g"),
        "rstd": ("n", "g"),
    }


@rule_from([aten.native_group_norm.default, aten.native_group_norm.out], local_args=_local_sizes)
def forward(call: Call) -> Flow:
    """Batch, or whole groups of channels."""
    dims = _dims(call)
    names = call.operand_names
    return Flow([dims[name] for name in names], [dims[name] for name in ("input", "mean", "rstd")], replicate={"c"})


@rule_from([aten.native_group_norm_backward.default, aten.native_group_norm_backward.out], local_args=_local_sizes)
def backward(call: Call) -> Flow:
    """Batch, which leaves the gradients of weight and bias partial sums, or whole groups of channels."""
    dims = _dims(call)
    return Flow(
        [dims[name] for name in call.operand_names],
        [dims[name] for name in ("input", "weight", "bias")],
        reduce={"n": "sum"},
        replicate={"c"},
        linear="grad_out",
    )


RULES = (forward, backward)
