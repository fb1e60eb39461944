"""The three ops that every function of ``torch.fft`` comes down to: transformed dims are whole, the others pass.

The distribution ``shardwise-fft`` has rules in place of these by which transformed dims stay sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


def _locally(local: LocalCall, x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
    """The op on a shard. Of no elements it makes none; torch's kernels refuse to transform nothing."""
    if x.numel():
        found = local.call.op.overloadpacket.default(x, *args)
    else:
        result = local.outputs[0]
        assert result is not None
        found = x.new_empty(local.local_shape(result), dtype=result.dtype)
    return found if out is None else out.copy_(found)


@rule_from(
    [
        *(aten._fft_c2c.default, aten._fft_c2c.out),
        *(aten._fft_r2c.default, aten._fft_r2c.out),
        *(aten._fft_c2r.default, aten._fft_c2r.out),
    ],
    lowering=_locally,
)
def TRANSFORM(call: Call) -> Flow:
    """Dims that are not transformed pass, and so do sums and averages."""
    x = call.args["self"]
    dims = {d % x.ndim for d in call.args["dim"]}
    labels = tuple(None if d in dims else f"d{d}" for d in range(x.ndim))
    return Flow([labels], [labels], partial=["sum -> sum", "avg -> avg"], lowered="*")


RULES = (TRANSFORM,)
