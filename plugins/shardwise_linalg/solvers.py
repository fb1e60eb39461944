"""Systems of equations. A solution is linear in the right-hand side, and each of its columns is solved for itself."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, TensorMeta, rule_from
from shardwise_linalg.batches import matrices, on_batches, ops

__all__ = ["RULES"]

aten = torch.ops.aten

LINEAR_FIRST = ("sum, R, ... -> sum, R, ...", "avg, R, ... -> avg, R, ...")
LINEAR_SECOND = ("R, sum -> sum, R, ...", "R, avg -> avg, R, ...")
LINEAR_THIRD = ("R, R, sum -> sum", "R, R, avg -> avg")


@rule_from(ops("_linalg_solve_ex.default _linalg_solve_ex.result"))
def SOLVE(self: TensorMeta, right: TensorMeta, left: bool, check_errors: bool, call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides in B; behind them _ _, _ n -> _ n, _ _, _, (), or the vector _."""
    if check_errors:
        return Flow([None], [None])
    vector = right.ndim == 1 or (self.ndim - 1 == right.ndim and self.shape[:-1] == right.shape)
    sides = "_" if vector else _sides(left=left)
    return matrices(call, f"_ _, {sides} -> {sides}, _ _, _, ()", partial=LINEAR_SECOND)


def _sides(*, left: bool) -> str:
    """Where the right-hand sides of a system lie: columns, or rows where the matrix stands on the right."""
    return "_ n" if left else "n _"


@rule_from(ops("linalg_solve_triangular.default linalg_solve_triangular.out"))
def SOLVE_TRIANGULAR(call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides; behind them _ _, _ n -> _ n, or n _ where the matrix is right."""
    right = _sides(left=call.args["left"])
    return matrices(call, f"_ _, {right} -> {right}", partial=LINEAR_SECOND)


@rule_from(ops("linalg_lu_solve.default linalg_lu_solve.out"))
def LU_SOLVE(call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides; behind them _ _, _, _ n -> _ n, or n _ where the matrix is right."""
    right = _sides(left=call.args["left"])
    return matrices(call, f"_ _, _, {right} -> {right}", partial=LINEAR_THIRD)


@rule_from(ops("ormqr.default ormqr.out"))
def ORMQR(call: Call) -> Flow:
    """Batch dims pass, and what the reflectors are applied to; behind them _ _, _, _ n -> _ n, or n _ on the right."""
    right = _sides(left=call.args["left"])
    return matrices(call, f"_ _, _, {right} -> {right}", partial=LINEAR_THIRD)


RULES = (
    SOLVE,
    SOLVE_TRIANGULAR,
    LU_SOLVE,
    ORMQR,
    on_batches("linalg_ldl_solve.default linalg_ldl_solve.out", "_ _, _, _ n -> _ n", partial=LINEAR_THIRD),
    on_batches(
        "cholesky_solve.default cholesky_solve.out _cholesky_solve_helper.default _cholesky_solve_helper.out",
        "_ n, _ _ -> _ n",
        partial=LINEAR_FIRST,
    ),
    on_batches("triangular_solve.default triangular_solve.X", "_ n, _ _ -> _ n, _ _", partial=LINEAR_FIRST),
)
