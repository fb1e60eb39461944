"""Views by strides whose dims are dims of the operand or windows along one of them; ``memory`` has the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from shardwise.rule import Flow, LocalCall, Rows, TensorMeta, labels, rule_from
from shardwise_views import memory
from shardwise_views.regroup import regroup

__all__ = ["RULES"]

aten = torch.ops.aten


# Local strides may differ from the global ones, so every row runs the lowering, the whole one too.
ALL = ("*", "R")

# -- _reshape_alias ----------------------------------------------------------------------------------------------


def _view_locally(local: LocalCall, x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    spec = local.outputs[0]
    assert spec is not None
    return x.view(local.local_shape(spec))


@rule_from(aten._reshape_alias.default, lowering=_view_locally)
def RESHAPE_ALIAS(self: TensorMeta, size: Sequence[int], stride: Sequence[int]) -> Flow:
    """As view, where view gives these strides; else whole."""
    try:
        is_view = self.to_meta_tensor().view(tuple(size)).stride() == tuple(stride)
    except RuntimeError:  # no view of these strides has that shape
        is_view = False
    return evolve(regroup(self.shape, size), lowered=ALL, scattered={"*"}) if is_view else Flow([None], [None])


# -- as_strided --------------------------------------------------------------------------------------------------


@frozen
class _Geometry:
    """What each dim of the result is: a dim of ``x`` (``dims``), or a number of steps along the one dim ``along``."""

    dims: tuple[int | None, ...]
    steps: tuple[int, ...]
    along: int | None


def _geometry(x: TensorMeta, size: Sequence[int], stride: Sequence[int]) -> _Geometry | None:
    """How the result lies in ``x``: its dims are dims of ``x``, or windows along at most one more. Else ``None``.

    The windows must end within that dim, or they would read memory that is not a part of ``x``.
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
    geometry = _geometry(local.spec("self").tensor_meta, size, stride)
    if geometry is None or storage_offset is not None:
        view = memory.strided(local, x, size, stride, storage_offset)
    else:
        unit = 0 if geometry.along is None else x.stride(geometry.along)
        pairs = zip(geometry.dims, geometry.steps, strict=True)
        view = x.as_strided(local.local_shape(spec), [step * unit if d is None else x.stride(d) for d, step in pairs])
    if out is not None:
        return out.copy_(view)
    return view if local.call.signature.results[0].alias is not None else view.clone()


@rule_from(
    [aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default, aten.as_strided_copy.out],
    lowering=_stride_locally,
)
def AS_STRIDED(
    self: TensorMeta, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Flow | Rows:
    """Dims reordered, added, or dropped at size one, and windows along one dim; other strides need the whole memory."""
    geometry = _geometry(self, size, stride)
    # An offset counts from the start of the memory, which the operand may share with tensors unknown here.
    if geometry is None or storage_offset is not None:
        return memory.rows(self, size, stride, storage_offset)
    names = labels(self.ndim, whole={d for d, n in enumerate(self.shape) if n == 1 or d == geometry.along})
    result = [None if d is None else names[d] for d in geometry.dims]
    return Flow([names], [result], moves="self", lowered=ALL, scattered="*")


RULES = (RESHAPE_ALIAS, AS_STRIDED)
