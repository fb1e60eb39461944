"""Dtypes: which tensors join without a cast, and which reductions commute with a cast."""

from __future__ import annotations

import torch

from shardwise.rule import REDUCE_OPS, TensorMeta

__all__ = ["commuting_with_cast", "same_dtype"]

_LINEAR = ("sum", "avg")


def same_dtype(*metas: TensorMeta | None) -> bool:
    """Whether the tensors have one dtype, so that they join without a cast."""
    return len({m.dtype for m in metas if m is not None}) <= 1


# -- casts -------------------------------------------------------------------------------------------------------


def commuting_with_cast(before: torch.dtype, after: torch.dtype) -> tuple[str, ...]:
    """The reductions that commute with a change of dtype.

    Maxima and minima commute with every monotone cast: between floats (rounding is monotone), from integers to
    floats, and to an integer that holds all values. Sums and products commute only with a cast to a wider float, in
    which the pieces are reduced at least as precisely as on one device. A narrower float rounds the pieces before they
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
