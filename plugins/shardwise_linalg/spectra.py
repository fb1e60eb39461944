"""Singular values, eigenvalues, determinants, inverses and functions of a square matrix."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from shardwise.rule import Call, TensorMeta
from shardwise_linalg.batches import on_batches, raise_together

__all__ = ["RULES"]


def _columns_last(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """On the CPU the columns of the last result are contiguous, whatever the meta device says."""
    *others, last = call.outputs
    if device_type != "cpu" or last is None or last.ndim < 2:  # noqa: PLR2004  matrices
        return call.outputs
    *_, m, n = last.shape
    steps = (*(s for s in last.stride[:-2]), 1, max(m, 1))
    return [*others, last if 0 in (m, n) else evolve(last, stride=steps)]


RULES = (
    on_batches(
        "_linalg_svd.default _linalg_svd.U", "_ _ -> _ _, _, _ _", lowering=raise_together, results=_columns_last
    ),
    on_batches("_linalg_eigh.default _linalg_eigh.eigenvalues", "_ _ -> _, _ _", lowering=raise_together),
    on_batches("linalg_eig.default linalg_eig.out", "_ _ -> _, _ _", lowering=raise_together, results=_columns_last),
    on_batches(
        "linalg_eigvals.default linalg_eigvals.out _linalg_eigvals.default", "_ _ -> _", lowering=raise_together
    ),
    on_batches("_linalg_det.default _linalg_det.result", "_ _ -> (), _ _, _"),
    on_batches("_linalg_slogdet.default _linalg_slogdet.sign", "_ _ -> (), (), _ _, _"),
    on_batches("linalg_inv_ex.default linalg_inv_ex.inverse", "_ _ -> _ _, ()", unless="check_errors"),
    on_batches(
        "linalg_pinv.atol_rtol_tensor linalg_pinv.atol_rtol_tensor_out", "_ _, (), () -> _ _", lowering=raise_together
    ),
    on_batches("linalg_matrix_exp.default linalg_matrix_exp.out", "_ _ -> _ _"),
)
