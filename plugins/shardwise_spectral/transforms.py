"""The three ops that the functions of ``torch.fft`` call: transformed dims are whole, the others pass.

The distribution ``shardwise-fft`` replaces these rules by ones under which transformed dims stay sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Flow, LocalCall, TensorMeta, like, rule_from
from shardwise_spectral.strides import strides_of_transform

__all__ = ["RULES"]

aten = torch.ops.aten


def _locally(local: LocalCall, x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
    """The op on a shard; an empty shard gives an empty result, since torch's kernels refuse it."""
    if x.numel():
        result = local.call.op.overloadpacket.default(x, *args)
    else:
        spec = local.outputs[0]
        assert spec is not None
        result = x.new_empty(local.local_shape(spec), dtype=spec.dtype)
    return result if out is None else out.copy_(result)


@rule_from(
    [
        *(aten._fft_c2c.default, aten._fft_c2c.out),
        *(aten._fft_r2c.default, aten._fft_r2c.out),
        *(aten._fft_c2r.default, aten._fft_c2r.out),
    ],
    lowering=_locally,
    results=strides_of_transform,
)
def TRANSFORM(self: TensorMeta, dim: Sequence[int]) -> Flow:
    """Dims that are not transformed pass; linear."""
    return like(self, whole=dim, linear="self", lowered="*", scattered="*")


RULES = (TRANSFORM,)
