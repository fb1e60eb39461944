"""Singular values, eigenvalues, determinants, inverses and functions of a square matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from shardwise.rule import Call, LocalCall, TensorMeta
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


def _as_the_whole_lies(local: LocalCall, matrix: torch.Tensor, **kwargs: Any) -> Any:
    """The local op on a matrix that is contiguous where the global one is, and only there.

    Torch's kernel factors the transposed matrix where the matrix is contiguous, and the derivative, which reads the
    factors, asks the global tensor whether it was. A part of a tensor with gaps in memory may have none.
    """
    if matrix.is_contiguous() != local.once(_is_contiguous):
        matrix = matrix.mT.contiguous().mT if matrix.is_contiguous() else matrix.contiguous()
    return local.call.op(matrix, **kwargs)


def _is_contiguous(local: LocalCall) -> bool:
    (matrix,) = local.call.operands
    return matrix is not None and matrix.is_contiguous


_DETERMINANTS: dict[str, Any] = {"lowering": _as_the_whole_lies, "lowered": ("*", "R")}

RULES = (
    on_batches(
        "_linalg_svd.default _linalg_svd.U", "_ _ -> _ _, _, _ _", lowering=raise_together, results=_columns_last
    ),
    on_batches("_linalg_eigh.default _linalg_eigh.eigenvalues", "_ _ -> _, _ _", lowering=raise_together),
    on_batches("linalg_eig.default linalg_eig.out", "_ _ -> _, _ _", lowering=raise_together, results=_columns_last),
    on_batches(
        "linalg_eigvals.default linalg_eigvals.out _linalg_eigvals.default", "_ _ -> _", lowering=raise_together
    ),
    on_batches("_linalg_det.default _linalg_det.result", "_ _ -> (), _ _, _", **_DETERMINANTS),
    on_batches("_linalg_slogdet.default _linalg_slogdet.sign", "_ _ -> (), (), _ _, _", **_DETERMINANTS),
    on_batches("linalg_inv_ex.default linalg_inv_ex.inverse", "_ _ -> _ _, ()", unless="check_errors"),
    on_batches(
        "linalg_pinv.atol_rtol_tensor linalg_pinv.atol_rtol_tensor_out", "_ _, (), () -> _ _", lowering=raise_together
    ),
    on_batches("linalg_matrix_exp.default linalg_matrix_exp.out", "_ _ -> _ _"),
)
