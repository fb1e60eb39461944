"""Products of groups (``_grouped_mm``): a batch of products, or one whose rows, columns or depth fall into groups.

``offs`` says where each group ends. Where the grouped dim is sharded, a rank has parts of some groups and ends of its
own; where the groups are (as experts are), it answers for the rows of its groups, and the sum is partial.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, TensorMeta, rule_from

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
        made = _aligned(a, b, ends, out_dtype)
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where((lengths > 0)[:, None, None], made, 0)
    if a.ndim == MATRIX:
        ends = _here(offs, local.offset(first)[0], a.shape[0])
        return _rows(a, b, ends, local.offset(second)[0], out_dtype)
    ends = _here(offs, local.offset(second)[1], b.shape[1])
    return _rows(b.mT, a.mT, ends, local.offset(first)[0], out_dtype).mT


def _here(ends: Tensor, start: int, size: int) -> Tensor:
    """Where the groups end among ``size`` elements from ``start`` on."""
    return (ends - start).clamp(0, size)


def _rows(a: Tensor, b: Tensor, ends: Tensor, first: int, out_dtype: torch.dtype | None) -> Tensor:
    """The rows of ``a`` by the matrices of ``b``, which are those of the groups from ``first`` on; zero elsewhere."""
    if len(ends) == len(b):
        return _aligned(a, b, ends, out_dtype)
    if not len(a) or not len(b):
        return a.new_zeros((a.shape[0], b.shape[2]), dtype=out_dtype)
    start = ends[first - 1] if first else ends.new_zeros(())
    mine = ends[first : first + len(b)]
    at = torch.arange(len(a), device=a.device)
    # The op wants its first group in the first row; where that is, the host does not know.
    made = _aligned(a[(at + start) % len(a)], b, (mine - start).to(ends.dtype), out_dtype)[(at - start) % len(a)]
    return torch.where(((at >= start) & (at < mine[-1]))[:, None], made, 0)


def _aligned(a: Tensor, b: Tensor, ends: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The op, on operands whose strides are what it takes. Of no elements it makes zeros."""
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
    made: Tensor = aten._grouped_mm.default(a, b, ends, None, out_dtype)
    return made[..., :n].contiguous()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros behind, and strides of its own: contiguous() leaves those of a dim of size one as they are."""
    made = x.new_zeros((*x.shape[:-2], rows, columns))
    made[..., : x.shape[-2], : x.shape[-1]] = x
    return made


def _fits(x: Tensor, unit: int) -> bool:
    """Whether rows or columns lie one behind the other, each dense and a multiple of the unit."""
    if 1 in x.shape[-2:]:
        return False
    *batch, row, column = x.stride()
    step, size = (row, x.shape[-1]) if column == 1 else (column, x.shape[-2])
    dense = 1 in (row, column) and step >= max(1, size)
    return dense and all(s > 0 and s % unit == 0 for s in (*batch, step)) and x.data_ptr() % ALIGNMENT == 0


# -- the rule ----------------------------------------------------------------------------------------------------


def _made(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the op makes; torch's own meta kernel takes bfloat16 alone, on every device."""
    grouped = MATRIX in (a.ndim, b.ndim)
    if not {a.ndim, b.ndim} <= {MATRIX, BATCH} or (offs is None) is grouped or bias is not None:
        raise RuntimeError("_grouped_mm takes matrices or batches, offs where one is a matrix, and no bias.")
    if a.shape[-1] != b.shape[-2] or (not grouped and a.shape[0] != b.shape[0]):
        raise RuntimeError(f"_grouped_mm cannot multiply {tuple(a.shape)} by {tuple(b.shape)}.")
    groups = offs.shape if offs is not None and a.ndim == b.ndim else a.shape[:1] if a.ndim == b.ndim else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


@rule_from(aten._grouped_mm.default, lowering=_grouped, meta=_made)
def GROUPED_MM(self: TensorMeta, mat2: TensorMeta, offs: TensorMeta | None, call: Call) -> Flow:
    """Named dims g m k, g k n -> g m n, where m, k or n may be made of the groups; offs is whole."""
    left = ["g", "m", "k"][-self.ndim :]
    right = ["g", "k", "n"][-mat2.ndim :]
    made = ["g", "m", "n"] if self.ndim == mat2.ndim else ["m", "n"]
    given = [None if meta is None else [None] * meta.ndim for meta in call.operands[2:]]
    summed = {"k": "sum"} if "g" in made else {"k": "sum", "g": "sum"}
    return Flow(
        [left, right, *given],
        [made],
        reduce=summed,
        linear=("self", "mat2") if call.operands[3] is None else (),
        lowered=("*", "R"),
    )


RULES = (GROUPED_MM,)
