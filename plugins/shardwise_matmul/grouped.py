"""Products of groups (``_grouped_mm``): a batch of products, or one whose rows, columns or depth fall into groups.

``offs`` says where each group ends. If the grouped dim is sharded, a rank has parts of some groups and its own ends of
them. If the groups themselves are sharded (as experts are), a rank computes the rows of its groups, a partial sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, TensorMeta, is_traced, is_without_data, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten

# Strides are multiples of this many bytes (aten/src/ATen/native/GroupedMMUtils.h).
ALIGNMENT = 16
MATRIX, BATCH = 2, 3


# -- on a shard --------------------------------------------------------------------------------------------------


def _grouped(
    local: LocalCall,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    first, second = local.inputs[:2]
    assert first is not None
    assert second is not None
    if offs is None:
        return _aligned(a, b, None, out_dtype)
    if a.ndim == b.ndim == MATRIX:
        ends = _here(offs, local.offset(first)[1], a.shape[1])
        product = _aligned(a, b, ends, out_dtype)
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where((lengths > 0)[:, None, None], product, 0)
    if a.ndim == MATRIX:
        ends = _here(offs, local.offset(first)[0], a.shape[0])
        return _rows(a, b, ends, local.offset(second)[0], out_dtype)
    ends = _here(offs, local.offset(second)[1], b.shape[1])
    return _rows(b.mT, a.mT, ends, local.offset(first)[0], out_dtype).mT


def _here(ends: Tensor, start: int, size: int) -> Tensor:
    """Where the groups end among ``size`` elements from ``start`` on."""
    return (ends - start).clamp(0, size)


def _rows(a: Tensor, b: Tensor, ends: Tensor, first: int, out_dtype: torch.dtype | None) -> Tensor:
    """The rows of ``a`` times the matrices of ``b``, which are those of the groups from ``first`` on; else zeros."""
    if len(ends) == len(b):
        return _aligned(a, b, ends, out_dtype)
    if not len(a) or not len(b):
        return a.new_zeros((a.shape[0], b.shape[2]), dtype=out_dtype)
    start = ends[first - 1] if first else ends.new_zeros(())
    mine = ends[first : first + len(b)]
    at = torch.arange(len(a), device=a.device)
    # The op needs its first group in the first row; the host does not know where that group starts.
    product = _aligned(a[(at + start) % len(a)], b, (mine - start).to(ends.dtype), out_dtype)[(at - start) % len(a)]
    return torch.where(((at >= start) & (at < mine[-1]))[:, None], product, 0)


def _aligned(a: Tensor, b: Tensor, ends: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The op, on operands with strides that it accepts; zeros if an operand has no elements."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    groups = (
        a.shape[:1]
        if a.ndim == BATCH
        else b.shape[:1]
        if b.ndim == BATCH
        else tuple(ends.shape if ends is not None else ())
    )
    batch = groups if a.ndim == b.ndim else ()
    if 0 in (m, k, n, *groups):
        return a.new_zeros((*batch, m, n), dtype=out_dtype)
    unit = max(1, ALIGNMENT // a.dtype.itemsize)
    if not (_fits(a, unit) and _fits(b, unit)):
        deep, wide = -(-k // unit) * unit, -(-n // unit) * unit
        a, b = _padded(a, m, deep), _padded(b, deep, wide)
    # In a rehearsal torch's fake tensors would take bfloat16 alone, as its meta kernel does.
    run = _on_meta if is_without_data(a) and not is_traced(a) else aten._grouped_mm.default
    product: Tensor = run(a, b, ends, None, out_dtype)
    return product[..., :n].contiguous()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x`` with zeros behind, in new memory: contiguous() would not change the stride of a dim of size one."""
    wide = x.new_zeros((*x.shape[:-2], rows, columns))
    wide[..., : x.shape[-2], : x.shape[-1]] = x
    return wide


def _fits(x: Tensor, unit: int) -> bool:
    """Whether rows or columns are dense, and one starts behind the other in a multiple of the unit.

    Neither a graph nor a rehearsal knows where its memory starts.
    """
    if 1 in x.shape[-2:] or is_without_data(x):
        return False
    *batch, row, column = x.stride()
    step, size = (row, x.shape[-1]) if column == 1 else (column, x.shape[-2])
    dense = 1 in (row, column) and step >= max(1, size)
    return dense and all(s > 0 and s % unit == 0 for s in (*batch, step)) and x.data_ptr() % ALIGNMENT == 0


# -- the rule ----------------------------------------------------------------------------------------------------


def _on_meta(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result on the meta device; torch's own meta kernel takes bfloat16 alone, on every device."""
    grouped = MATRIX in (a.ndim, b.ndim)
    if not {a.ndim, b.ndim} <= {MATRIX, BATCH} or (offs is None) is grouped or bias is not None:
        raise RuntimeError("_grouped_mm takes matrices or batches, offs where one is a matrix, and no bias.")
    if a.shape[-1] != b.shape[-2] or (not grouped and a.shape[0] != b.shape[0]):
        raise RuntimeError(f"_grouped_mm cannot multiply {tuple(a.shape)} by {tuple(b.shape)}.")
    groups = offs.shape if offs is not None and a.ndim == b.ndim else a.shape[:1] if a.ndim == b.ndim else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


@rule_from(aten._grouped_mm.default, lowering=_grouped, meta=_on_meta)
def GROUPED_MM(self: TensorMeta, mat2: TensorMeta, offs: TensorMeta | None, call: Call) -> Flow:
    """Named dims g m k, g k n -> g m n, where m, k or n may consist of the groups; offs is whole.

    It is long because the numbers of dims of both factors say where the groups are.
    """
    left = ["g", "m", "k"][-self.ndim :]
    right = ["g", "k", "n"][-mat2.ndim :]
    result = ["g", "m", "n"] if self.ndim == mat2.ndim else ["m", "n"]
    others = [None if meta is None else [None] * meta.ndim for meta in call.operands[2:]]
    summed = {"k": "sum"} if "g" in result else {"k": "sum", "g": "sum"}
    return Flow(
        [left, right, *others],
        [result],
        reduce=summed,
        linear=("self", "mat2") if call.operands[3] is None else (),
        lowered=("*", "R"),
    )


RULES = (GROUPED_MM,)
