"""Several tensors put together: all have the same placements, and the dim along which they are joined is whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, TensorMeta, dim_of, labels, rule_from
from shardwise_tensor.dtypes import same_dtype

__all__ = ["RULES"]

aten = torch.ops.aten


def _joined(_: LocalCall, tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Copied to ``out``: the kernel writes nothing to one of joined size 1 whose stride there is more than its rows."""
    joined = torch.cat(tuple(tensors), dim)
    return joined if out is None else out.copy_(joined)


@rule_from([aten.cat.default, aten.cat.out], lowering=_joined)
def CAT(tensors: Sequence[TensorMeta], dim: int = 0, *, call: Call) -> Flow:
    """All tensors with the same placements, the joined dim whole; tensors of shape (0,) are ignored."""
    ndim = next((t.ndim for t in tensors if t.shape != (0,)), 1)
    names = labels(ndim, {dim_of(dim, ndim)})
    inputs = [(None,) if t.shape == (0,) else names for t in tensors]
    return Flow(inputs, [names], moves=_one_dtype(call), lowered="*" if call.out_operands else ())


@rule_from([aten.stack.default, aten.stack.out])
def STACK(tensors: Sequence[TensorMeta], dim: int = 0, *, call: Call) -> Flow:
    """All tensors with the same placements; the new dim is whole."""
    ndim = tensors[0].ndim
    names = labels(ndim)
    at = dim_of(dim, ndim + 1)
    return Flow([names] * len(tensors), [(*names[:at], None, *names[at:])], moves=_one_dtype(call))


@rule_from([aten._chunk_cat.default, aten._chunk_cat.out])
def CHUNK_CAT(tensors: Sequence[TensorMeta], dim: int, *, call: Call) -> Flow:
    """Dims before the chunked one, together in all tensors; the chunked dim and the dims behind it are whole."""
    at = dim_of(dim, tensors[0].ndim)
    names = labels(at)
    inputs = [(*names, *[None] * (t.ndim - at)) for t in tensors]
    # The kernel divides by the number of elements.
    return Flow(inputs, [(*names, None, None)], moves=_one_dtype(call), nonempty=[n for n in names if n])


def _one_dtype(call: Call) -> tuple[str, ...]:
    """The operands that may be partial together: all of them if none is cast."""
    return ("tensors",) if same_dtype(*call.operands, *call.outputs) else ()


RULES = (CAT, STACK, CHUNK_CAT)
