"""Views by explicit strides that are a permutation or expansion of the whole operand; others are in ``memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve

from shardwise.rule import Call, Flow, LocalCall, Rows, rule_from
from shardwise.spec import TensorMeta
from shardwise_views import memory
from shardwise_views.regroup import regroup

__all__ = ["RULES"]

aten = torch.ops.aten


def _always_lowered(flow: Flow) -> Callable[[Call], Rows]:
    """All rows through the lowering, the whole one too: local strides may differ from the global ones."""
    return lambda call: Rows(tuple(evolve(row, lowered=True) for row in flow.bind(call).rows))


# -- _reshape_alias ----------------------------------------------------------------------------------------------


def _view_locally(local: LocalCall, x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    spec = local.outputs[0]
    assert spec is not None
    return x.view(local.local_shape(spec))


@rule_from(aten._reshape_alias.default, lowering=_view_locally)
def RESHAPE_ALIAS(self: TensorMeta, size: Sequence[int]) -> Callable[[Call], Rows]:
    """As view: the strides only say what the view has anyway."""
    return _always_lowered(regroup(self.shape, size))


# -- as_strided --------------------------------------------------------------------------------------------------


def _sources(x: TensorMeta, size: Sequence[int], stride: Sequence[int]) -> list[int | None] | None:
    """Per dim of the result, the dim of ``x`` that it is, or ``None`` for one of size one or expanded.

    ``None`` when a dim is neither, or when a dim of ``x`` is left out.
    """
    left = [d for d, n in enumerate(x.shape) if n != 1]
    found: list[int | None] = []
    for n, step in zip(size, stride, strict=True):
        source = next((d for d in left if (x.shape[d], x.stride[d]) == (n, step)), None)
        if source is None and n != 1 and step != 0:
            return None
        if source is not None:
            left.remove(source)
        found.append(source)
    return None if left else found


def _stride_locally(
    local: LocalCall,
    x: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    spec = local.outputs[0]
    assert spec is not None
    sources = _sources(local.spec("self").tensor_meta, size, stride)
    if sources is None or storage_offset is not None:
        seen = memory.strided(local, x, size, stride, storage_offset)
    else:
        steps = [0 if d is None else x.stride(d) for d in sources]
        seen = x.as_strided(local.local_shape(spec), steps)
    if out is not None:
        return out.copy_(seen)
    return seen if local.call.signature.results[0].alias is not None else seen.clone()


@rule_from(
    [aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default, aten.as_strided_copy.out],
    lowering=_stride_locally,
)
def AS_STRIDED(
    self: TensorMeta, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Callable[[Call], Rows] | Flow | Rows:
    """Dims reordered, dropped at size one, or new; for any other geometry, or an offset, all of the memory."""
    sources = _sources(self, size, stride)
    # An offset counts from the start of the memory, which the operand may share with tensors unknown here.
    if sources is None or storage_offset is not None:
        return memory.rows(self, size, stride, storage_offset)
    names = [f"d{d}" if n != 1 else None for d, n in enumerate(self.shape)]
    out = [None if d is None else names[d] for d in sources]
    return _always_lowered(Flow([names], [out], partial=("* -> *",)))


RULES = (RESHAPE_ALIAS, AS_STRIDED)
