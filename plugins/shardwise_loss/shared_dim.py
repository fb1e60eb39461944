"""Softmax over a dim that several ranks share.

A softmax needs one maximum and one sum per line from the other shards, its backward one sum. These are two small
all-reduces, or one; a gather would move the whole operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import LocalCall

__all__ = ["log_softmax", "log_softmax_backward", "safe_softmax", "softmax", "softmax_backward"]


def _wide(x: Tensor) -> Tensor:
    """``x`` in the dtype to add up in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _parts(local: LocalCall, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The peak of each line over all shards, the values less their peak, their exponentials, and the sums of these.

    Peaks and sums are over all shards and have size one along ``dim``.
    """
    wide, mesh_dims = _wide(x), local.sharding(local.spec("self"), dim)
    if wide.shape[dim]:
        mine = wide.amax(dim, keepdim=True)
    else:
        mine = wide.new_full([1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)], float("-inf"))
    peak = local.comm.all_reduce(mine, "max", mesh_dims)
    # The all-reduce of maxima may drop NaN; that of sums does not, as the exponential of NaN is NaN.
    shifted = wide - peak
    exponentials = shifted.exp()
    total = local.comm.all_reduce(exponentials.sum(dim, keepdim=True), "sum", mesh_dims)
    return peak, shifted, exponentials, total


def _as_output(local: LocalCall, result: Tensor, outs: Mapping[str, Any]) -> Tensor:
    """``result`` in the dtype of the output; copied into the ``out=`` tensor if the call has one."""
    spec = local.outputs[0]
    assert spec is not None
    out = next((t for t in outs.values() if isinstance(t, Tensor)), None)
    return result.to(spec.dtype) if out is None else out.copy_(result)


def softmax(local: LocalCall, x: Tensor, dim: int, *rest: Any, **outs: Any) -> Tensor:
    """``_softmax`` of shards of ``dim``."""
    del rest
    _, _, exponentials, total = _parts(local, x, dim)
    return _as_output(local, exponentials / total, outs)


def safe_softmax(local: LocalCall, x: Tensor, dim: int, *rest: Any, **options: Any) -> Tensor:
    """``_safe_softmax`` of shards of ``dim``: a line of minus infinities gives zeros."""
    del rest, options
    peak, _, exponentials, total = _parts(local, x, dim)
    return _as_output(local, (exponentials / total).masked_fill(peak == float("-inf"), 0), {})


def log_softmax(local: LocalCall, x: Tensor, dim: int, *rest: Any, **outs: Any) -> Tensor:
    """``_log_softmax`` of shards of ``dim``."""
    del rest
    _, shifted, _, total = _parts(local, x, dim)
    return _as_output(local, shifted - total.log(), outs)


def _total(local: LocalCall, x: Tensor, dim: int) -> Tensor:
    return local.comm.all_reduce(x.sum(dim, keepdim=True), "sum", local.sharding(local.spec("output"), dim))


def softmax_backward(
    local: LocalCall, gradient: Tensor, output: Tensor, dim: int, _: torch.dtype, **outs: Any
) -> Tensor:
    """``_softmax_backward_data`` of shards of ``dim``."""
    wide, probabilities = _wide(gradient), _wide(output)
    weighted = wide * probabilities
    total = _total(local, weighted, dim)
    # Torch's kernels differ, and infinities show it.
    if gradient.device.type == "cpu":
        return _as_output(local, (wide - total) * probabilities, outs)
    return _as_output(local, weighted - probabilities * total, outs)


def log_softmax_backward(
    local: LocalCall, gradient: Tensor, output: Tensor, dim: int, _: torch.dtype, **outs: Any
) -> Tensor:
    """``_log_softmax_backward_data`` of shards of ``dim``."""
    wide = _wide(gradient)
    return _as_output(local, wide - _wide(output).exp() * _total(local, wide, dim), outs)
