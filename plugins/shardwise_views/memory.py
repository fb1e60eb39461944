"""Ops that read a tensor as memory: other strides or other sizes over the same elements.

The memory is that of the whole tensor on one device, so the elements are gathered first. An offset counts from the
start of the memory; a call with an offset needs a tensor that fills its memory on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from attrs import evolve

from shardwise.errors import NoStrategyError, TracingError
from shardwise.rule import Flow, LocalCall, Partial, Rows, TensorMeta, is_traced, like, rule_from

__all__ = ["RULES", "rows", "strided"]

aten = torch.ops.aten


# -- which rows --------------------------------------------------------------------------------------------------


def _is_dense(x: TensorMeta) -> bool:
    """Whether the elements fill their memory without gap or overlap, in any order."""
    step = 1
    for n, stride in sorted(((n, s) for n, s in zip(x.shape, x.stride, strict=True) if n != 1), key=lambda p: p[1]):
        if stride != step:
            return x.numel == 0
        step *= n
    return True


def _reach(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """How many elements of memory a geometry needs."""
    if 0 in size:
        return 0
    return offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def rows(x: TensorMeta, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Flow | Rows:
    """From any placement to a whole result. There is no row if the result reaches beyond the tensor's memory."""
    if not _is_dense(x) or _reach(size, stride, offset or 0) > x.numel:
        return Rows(())
    names = [f"d{d}" for d in range(x.ndim)]
    return Flow([names], [None], reduce=dict.fromkeys(names, "R"), partial=("* -> R",), lowered=("*", "R"))


# -- the memory --------------------------------------------------------------------------------------------------


def _gather(local: LocalCall, x: torch.Tensor) -> torch.Tensor:
    """The whole tensor, from the local parts of all ranks."""
    spec = local.spec("self")
    for mesh_dim, placement in reversed(list(enumerate(spec.placements))):
        if isinstance(placement, Partial):
            x = local.comm.all_reduce(x, placement.reduce_op, (mesh_dim,))
    for d in range(x.ndim):
        if mesh_dims := local.sharding(spec, d):
            x = torch.cat(local.comm.all_gather(x, mesh_dims), d)
    return x


def _check_alone(local: LocalCall, x: torch.Tensor) -> None:
    """Raise on every rank if, on any rank, the tensor is a view of a part of its memory."""
    spec = local.spec("self")
    alone = x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.numel() * x.itemsize and not spec.is_copy
    if is_traced(x):
        # A view of a part is one on at least one rank, and that rank ends the others.
        if alone:
            return
        raise TracingError(
            asked=f"run {local.call} with storage_offset={local.arg('storage_offset')}",
            found="a graph is traced, and the tensor is a view: an offset from the start of its memory leads out of it",
            do="Leave the offset out, clone() the view first, or do it outside of compiled code.",
        )
    flag = torch.tensor(int(alone), dtype=torch.int32, device=x.device)
    if not int(local.comm.all_reduce(flag, "min", range(len(spec.placements)))):
        raise NoStrategyError(
            asked=f"run {local.call} with storage_offset={local.arg('storage_offset')}",
            found="the tensor is a view, and an offset from the start of its memory leads out of it",
            do="Leave the offset out, or clone() the view first.",
        )


def _in_order(local: LocalCall, x: torch.Tensor) -> torch.Tensor:
    """The whole tensor, with the memory of one device; ``x`` itself if it is whole and has that."""
    meta = local.spec("self").tensor_meta
    whole = _gather(local, x)
    if any(n != 1 and step != own for n, step, own in zip(meta.shape, meta.stride, whole.stride(), strict=True)):
        result = local.call.signature.results[0]
        if result.alias is not None and not result.written and whole is x:
            raise NoStrategyError(
                asked=f"see the memory of {local.spec('self')} in {local.call}",
                found=f"on this mesh its strides are {whole.stride()}",
                do="clone() it with memory_format=torch.contiguous_format first.",
            )
        whole = torch.empty_strided(meta.shape, meta.stride, dtype=x.dtype, device=x.device).copy_(whole)
    return whole


def _memory(local: LocalCall, x: torch.Tensor) -> torch.Tensor:
    """The elements in one dim, in the order of one device; a view of ``x`` if ``x`` is whole and has that order."""
    return _in_order(local, x).as_strided((local.spec("self").tensor_meta.numel,), (1,))


def strided(
    local: LocalCall, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> torch.Tensor:
    """The whole memory in another geometry."""
    if offset is not None:
        _check_alone(local, x)
    # A graph can write to a view of one as_strided, and not of two.
    whole = _in_order(local, x)
    return whole.as_strided(size, stride, whole.storage_offset() + (offset or 0))


# -- writing -----------------------------------------------------------------------------------------------------


def _scatter(
    local: LocalCall,
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if storage_offset is not None:
        _check_alone(local, x)
    meta = local.spec("self").tensor_meta
    line = _memory(local, x).clone()
    line.as_strided(size, stride, storage_offset or 0).copy_(src)
    result = line.as_strided(meta.shape, meta.stride)
    return result if out is None else out.copy_(result)


@rule_from([aten.as_strided_scatter.default, aten.as_strided_scatter.out], lowering=_scatter)
def AS_STRIDED_SCATTER(
    self: TensorMeta, src: TensorMeta, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Flow | Rows:
    """From any placement to a whole result, with a whole source."""
    if not _is_dense(self) or _reach(size, stride, storage_offset or 0) > self.numel:
        return Rows(())
    names = [f"d{d}" for d in range(self.ndim)]
    return Flow([names, None], [None], reduce=dict.fromkeys(names, "R"), partial=("*, R -> R",), lowered=("*", "R"))


# -- sizes -------------------------------------------------------------------------------------------------------


def _resize(local: LocalCall, x: torch.Tensor, *_: Any, memory_format: torch.memory_format | None = None) -> Any:
    spec = local.outputs[0]
    assert spec is not None
    if local.local_shape(spec) != tuple(x.shape):
        x = _memory(local, x).resize_(spec.shape)
    return x if memory_format is None else x.resize_(spec.shape, memory_format=memory_format)


def _resized(x: TensorMeta, size: Sequence[int], memory_format: torch.memory_format | None) -> Flow | Rows:
    if tuple(size) == tuple(x.shape) and memory_format in (None, torch.preserve_format):
        return like(x, moves="self", lowered=("*", "R"))
    return Flow([None], [None], lowered=("R",)) if _is_dense(x) else Rows(())


def _resized_as(x: TensorMeta, template: TensorMeta, memory_format: torch.memory_format | None) -> Flow | Rows:
    rows = _resized(x, template.shape, memory_format)
    return rows if isinstance(rows, Rows) else evolve(rows, inputs=[*rows.inputs, None])


@rule_from(aten.resize_.default, lowering=_resize)
def RESIZE(self: TensorMeta, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Flow | Rows:
    """Any placement where the size stays; whole where it changes, since resize_ cuts the memory of the whole tensor."""
    return _resized(self, size, memory_format)


@rule_from(aten.resize_as_.default, lowering=_resize)
def RESIZE_AS(
    self: TensorMeta, the_template: TensorMeta, *, memory_format: torch.memory_format | None = None
) -> Flow | Rows:
    """As resize_; the template is whole, and only its size counts."""
    return _resized_as(self, the_template, memory_format)


def _resize_copy(local: LocalCall, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _resize(local, x.clone(), *args, **kwargs)


@rule_from(aten.resize.default, lowering=_resize_copy)
def RESIZED(self: TensorMeta, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Flow | Rows:
    """As resize_, to as many elements or fewer: of more, torch leaves the last ones undefined."""
    return _resized(self, size, memory_format) if prod(size) <= self.numel else Rows(())


@rule_from(aten.resize_as.default, lowering=_resize_copy)
def RESIZED_AS(
    self: TensorMeta, the_template: TensorMeta, *, memory_format: torch.memory_format | None = None
) -> Flow | Rows:
    """As resize_as_, to as many elements or fewer: of more, torch leaves the last ones undefined."""
    rows = _resized_as(self, the_template, memory_format)
    return rows if the_template.numel <= self.numel else Rows(())


RULES = (AS_STRIDED_SCATTER, RESIZE, RESIZE_AS, RESIZED, RESIZED_AS)
