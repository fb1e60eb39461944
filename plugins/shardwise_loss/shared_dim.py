"""Softmax over a dim that several ranks share.

A softmax needs of the other shards one maximum and one sum per line, its backward one sum: two (one) small all-reduces,
where gathering would move the whole operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import LocalCall

__all__ = ["log_softmax", "log_softmax_backward", "safe_softmax", "softmax", "softmax_backward"]


def _wide(x: Tensor) -> Tensor:
    """In the dtype to add up in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _peak(local: LocalCall, x: Tensor, dim: int) -> Tensor:
    """The largest value of each line over all shards, ``dim`` kept; minus infinity of an empty shard."""
    if x.shape[dim]:
        mine = x.amax(dim, keepdim=True)
    else:
        mine = x.new_full([1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)], float("-inf"))
    return local.comm.all_reduce(mine, "max", local.sharding(local.spec("self"), dim))


def _parts(local: LocalCall, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Peaks, values less their peak, powers of these, and the sums of the powers over all shards."""
    wide = _wide(x)
    peak = _peak(local, wide, dim)
    # A maximum on the wire may pass over NaN; the sum does not, as the powers of NaN are NaN.
    shifted = wide - peak
    powers = shifted.exp()
    total = local.comm.all_reduce(powers.sum(dim, keepdim=True), "sum", local.sharding(local.spec("self"), dim))
    return peak, shifted, powers, total


def _given(local: LocalCall, result: Tensor, outs: Mapping[str, Any]) -> Tensor:
    """The answer in its dtype, in the ``out=`` tensor when there is one."""
    spec = local.outputs[0]
    assert spec is not None
    out = next((t for t in outs.values() if isinstance(t, Tensor)), None)
    return result.to(spec.dtype) if out is None else out.copy_(result)


def softmax(local: LocalCall, x: Tensor, dim: int, *rest: Any, **outs: Any) -> Tensor:
    """``_softmax`` of shards of ``dim``."""
    del rest
    _, _, powers, total = _parts(local, x, dim)
    return _given(local, powers / total, outs)


def safe_softmax(local: LocalCall, x: Tensor, dim: int, *rest: Any, **options: Any) -> Tensor:
    """``_safe_softmax`` of shards of ``dim``: a line of minus infinities gives zeros."""
    del rest, options
    peak, _, powers, total = _parts(local, x, dim)
    return _given(local, (powers / total).masked_fill(peak == float("-inf"), 0), {})


def log_softmax(local: LocalCall, x: Tensor, dim: int, *rest: Any, **outs: Any) -> Tensor:
    """``_log_softmax`` of shards of ``dim``."""
    del rest
    _, shifted, _, total = _parts(local, x, dim)
    return _given(local, shifted - total.log(), outs)


def _total(local: LocalCall, x: Tensor, dim: int) -> Tensor:
    return local.comm.all_reduce(x.sum(dim, keepdim=True), "sum", local.sharding(local.spec("output"), dim))


def softmax_backward(
    local: LocalCall, gradient: Tensor, output: Tensor, dim: int, _: torch.dtype, **outs: Any
) -> Tensor:
    """``_softmax_backward_data`` of shards of ``dim``."""
    weighted, made = _wide(gradient) * _wide(output), _wide(output)
    return _given(local, weighted - made * _total(local, weighted, dim), outs)


def log_softmax_backward(
    local: LocalCall, gradient: Tensor, output: Tensor, dim: int, _: torch.dtype, **outs: Any
) -> Tensor:
    """``_log_softmax_backward_data`` of shards of ``dim``."""
    wide = _wide(gradient)
    return _given(local, wide - _wide(output).exp() * _total(local, wide, dim), outs)
