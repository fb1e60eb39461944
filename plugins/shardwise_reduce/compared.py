"""Ops whose gradient compares an operand with the result.

They stand apart from their rules, whose modules are imported when they are first seen.
"""

from __future__ import annotations

import torch

__all__ = ["COMPARED"]

aten = torch.ops.aten

COMPARED = (
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.median.default,
    aten.nanmedian.default,
    # An infinite norm is a maximum.
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
    aten.dist.default,
)
