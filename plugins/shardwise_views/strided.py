"""Views by explicit strides that are made of dims of the operand and of windows along one; others are in ``memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve, frozen

from shardwise.rule import Call, Flow, LocalCall, Rows, TensorMeta, rule_from
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


@frozen
class _Geometry:
    """What each dim of the result is: a dim of ``x`` (``dims``), or else so many steps along the one dim ``along``."""

    dims: tuple[int | None, ...]
    steps: tuple[int, ...]
    along: int | None


def _geometry(x: TensorMeta, size: Sequence[int], stride: Sequence[int]) -> _Geometry | None:
    """How the result lies in ``x``, when it is made of dims of it and of windows along at most one more.

    What windows reach must lie within that dim, or they would read what is no part of ``x``.
    """
    left = [d for d, n in enumerate(x.shape) if n != 1]
    dims: list[int | None] = []
    for n, step in zip(size, stride, strict=True):
        source = next((d for d in left if (x.shape[d], x.stride[d]) == (n, step)), None)
        if source is not None:
            left.remove(source)
        dims.append(source)
    moves = [0 if n == 1 or d is not None else step for d, n, step in zip(dims, size, stride, strict=True)]
    along = left[0] if left else None
    unit = x.stride[along] if along is not None else 0
    if len(left) > 1 or any(step and (not unit or step % unit) for step in moves):
        return None
    steps = tuple(step // unit if unit else 0 for step in moves)
    reach = sum((n - 1) * step for n, step in zip(size, steps, strict=True))
    if 0 not in size and along is not None and (reach >= x.shape[along] or min(steps, default=0) < 0):
        return None
    return _Geometry(tuple(dims), steps, along)


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
    found = _geometry(local.spec("self").tensor_meta, size, stride)
    if found is None or storage_offset is not None:
        seen = memory.strided(local, x, size, stride, storage_offset)
    else:
        unit = 0 if found.along is None else x.stride(found.along)
        steps = [step * unit if d is None else x.stride(d) for d, step in zip(found.dims, found.steps, strict=True)]
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
    """Dims reordered, dropped at size one, or new, and windows along one dim; by other strides, all of the memory."""
    found = _geometry(self, size, stride)
    # An offset counts from the start of the memory, which the operand may share with tensors unknown here.
    if found is None or storage_offset is not None:
        return memory.rows(self, size, stride, storage_offset)
    names = [f"d{d}" if n != 1 and d != found.along else None for d, n in enumerate(self.shape)]
    out = [None if d is None else names[d] for d in found.dims]
    return _always_lowered(Flow([names], [out], partial=("* -> *",)))


RULES = (RESHAPE_ALIAS, AS_STRIDED)
