"""Factorizations: Cholesky, LU, LDL, QR and its reflectors."""

from __future__ import annotations

from torch import Tensor

from shardwise.rule import rule
from shardwise_linalg.batches import on_batches, ops, together

__all__ = ["RULES"]

# A factorization of the `_ex` kind says in its last result what failed, and raises where it is asked to: then the
# matrices are whole, so that all ranks raise alike.
CHECKED = "check_errors"


def _reflectors(x: Tensor, **out: Tensor) -> tuple[Tensor, ...]:
    """What geqrf gives on the meta device, which torch does not say: columns lie one behind the other."""
    if out:
        return tuple(out.values())
    if x.ndim < 2:  # noqa: PLR2004  matrices
        raise RuntimeError(f"torch.geqrf: input must have at least 2 dimensions, not {x.ndim}.")
    *batch, m, n = x.shape
    return x.new_empty((*batch, n, m)).transpose(-1, -2), x.new_empty((*batch, min(m, n)))


RULES = (
    on_batches("linalg_cholesky_ex.default linalg_cholesky_ex.L", "_ _ -> _ _, ()", unless=CHECKED),
    on_batches("cholesky.default cholesky.out", "_ _ -> _ _", lowering=together),
    on_batches("cholesky_inverse.default cholesky_inverse.out", "_ _ -> _ _", lowering=together),
    on_batches("linalg_lu_factor_ex.default linalg_lu_factor_ex.out", "_ _ -> _ _, _, ()", unless=CHECKED),
    on_batches("linalg_lu.default linalg_lu.out", "_ _ -> _ _, _ _, _ _"),
    on_batches("lu_unpack.default lu_unpack.out", "_ _, _ -> _ _, _ _, _ _"),
    on_batches("linalg_ldl_factor_ex.default linalg_ldl_factor_ex.out", "_ _ -> _ _, _, ()", unless=CHECKED),
    on_batches("linalg_qr.default linalg_qr.out", "_ _ -> _ _, _ _"),
    on_batches("geqrf.default geqrf.a", "_ _ -> _ _, _", meta=_reflectors),
    on_batches("linalg_householder_product.default linalg_householder_product.out", "_ _, _ -> _ _"),
    # Raises for the whole batch, by what a factorization found: each rank must see all of it.
    rule(ops("_linalg_check_errors.default"), "R ->"),
)
