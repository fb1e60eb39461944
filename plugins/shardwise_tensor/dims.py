"""The words that the rules here share: labels for dims, and reductions by what an op does to values."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from shardwise.rule import REDUCE_OPS, TensorMeta

__all__ = ["ANY", "UNMOVED", "Labels", "dim_of", "each", "kept_by_cast", "labels", "replaced", "same_dtype"]

Labels = tuple[str | None, ...]

# Each element of a result is one element of the operand; a list of results lies alike.
ANY = ("* -> *, ...",)
_LINEAR = ("sum", "avg")
# Kinds under which equal pieces reduce to themselves: a value that is whole may join a tensor that is so partial.
UNMOVED = ("avg", "max", "min")


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front; a tensor without dims has dim 0, as in torch."""
    return dim % ndim if ndim else 0


def labels(ndim: int, whole: Iterable[int] = ()) -> Labels:
    """``d0 d1 ...`` with ``None`` for the dims that must be whole."""
    kept = set(whole)
    return tuple(None if d in kept else f"d{d}" for d in range(ndim))


def replaced(names: Labels, dim: int, *by: str | None) -> Labels:
    """The labels with one dim replaced by others, or dropped."""
    return (*names[:dim], *by, *names[dim + 1 :])


def each(kinds: Iterable[str], *rows: str) -> tuple[str, ...]:
    """The row texts once for each reduction, which stands in them as ``k``."""
    return tuple(re.sub(r"\bk\b", kind, row) for kind in kinds for row in rows)


def same_dtype(*metas: TensorMeta | None) -> bool:
    """Whether the tensors need no cast to be put together."""
    return len({m.dtype for m in metas if m is not None}) <= 1


# -- casts -------------------------------------------------------------------------------------------------------


def kept_by_cast(before: torch.dtype, after: torch.dtype) -> tuple[str, ...]:
    """The reductions that commute with a change of dtype.

    Maxima and minima commute with every monotone cast: between floats (rounding is monotone), from integers to
    floats, and to an integer that holds all values. Sums and products do so only towards wider floats, where the
    pieces are then reduced at least as precisely as on one device: a narrower one rounds the pieces before they
    cancel, and integers wrap around.
    """
    if before == after:
        return REDUCE_OPS
    if after.is_complex:
        return _LINEAR if _is_real(before) and _holds_float(before.to_real(), after.to_real()) else ()
    if _is_float(after):
        if _is_float(before):
            return REDUCE_OPS if _holds_float(before, after) else ("max", "min")
        return ("max", "min") if _is_integer(before) else ()
    return ("max", "min") if _is_integer(before) and _holds_integer(before, after) else ()


def _is_float(dtype: torch.dtype) -> bool:
    # Floats of one byte overflow to NaN or saturate, each kind in its own way.
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_complex or _is_float(dtype)


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _holds_float(before: torch.dtype, after: torch.dtype) -> bool:
    if not (_is_float(before) and _is_float(after)):
        return False
    narrow, wide = torch.finfo(before), torch.finfo(after)
    return wide.max >= narrow.max and wide.eps <= narrow.eps


def _holds_integer(before: torch.dtype, after: torch.dtype) -> bool:
    if after == torch.bool or not _is_integer(after):
        return False
    if before == torch.bool:
        return True
    narrow, wide = torch.iinfo(before), torch.iinfo(after)
    return wide.min <= narrow.min and wide.max >= narrow.max
