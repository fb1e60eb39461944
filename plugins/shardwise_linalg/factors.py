"""Factorizations: Cholesky, LU, LDL, QR and its reflectors."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.rule import rule
from shardwise_linalg.batches import on_batches, ops, raise_together

__all__ = ["RULES"]

# A factorization of the `_ex` kind says in its last result what failed. With this flag it raises instead: then the
# matrices are whole, so that every rank raises.
CHECKED = "check_errors"


def _reflectors(x: Tensor, **out: Tensor) -> tuple[Tensor, ...]:
    """The results of geqrf on the meta device, where torch has no kernel: the columns are contiguous."""
    if out:
        return tuple(out.values())
    if x.ndim < 2:  # noqa: PLR2004  matrices
        raise RuntimeError(f"torch.geqrf: input must have at least 2 dimensions, not {x.ndim}.")
    *batch, m, n = x.shape
    return x.new_empty((*batch, n, m)).transpose(-1, -2), x.new_empty((*batch, min(m, n)))


RULES = (
    on_batches("linalg_cholesky_ex.default linalg_cholesky_ex.L", "_ _ -> _ _, ()", unless=CHECKED),
    # Gone from torch 2.14 on.
    *(
        [on_batches("cholesky.default cholesky.out", "_ _ -> _ _", lowering=raise_together)]
        if hasattr(torch.ops.aten, "cholesky")
        else []
    ),
    on_batches("cholesky_inverse.default cholesky_inverse.out", "_ _ -> _ _", lowering=raise_together),
    on_batches("linalg_lu_factor_ex.default linalg_lu_factor_ex.out", "_ _ -> _ _, _, ()", unless=CHECKED),
    on_batches("linalg_lu.default linalg_lu.out", "_ _ -> _ _, _ _, _ _"),
    on_batches("lu_unpack.default lu_unpack.out", "_ _, _ -> _ _, _ _, _ _"),
    on_batches("linalg_ldl_factor_ex.default linalg_ldl_factor_ex.out", "_ _ -> _ _, _, ()", unless=CHECKED),
    on_batches("linalg_qr.default linalg_qr.out", "_ _ -> _ _, _ _"),
    on_batches("geqrf.default geqrf.a", "_ _ -> _ _, _", meta=_reflectors),
    on_batches("linalg_householder_product.default linalg_householder_product.out", "_ _, _ -> _ _"),
    # Raises if the factorization of any matrix failed: every rank must see the whole batch.
    rule(ops("_linalg_check_errors.default"), "R ->"),
)
