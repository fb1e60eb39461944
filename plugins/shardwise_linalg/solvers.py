"""Systems of equations. A solution is linear in the right-hand side, and each of its columns is solved for itself."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, TensorMeta, linear, rule_from, whole
from shardwise_linalg.batches import matrices, on_batches, ops

__all__ = ["RULES"]

aten = torch.ops.aten

# The other results of these ops, where there are any, are factors of the matrix alone.


@rule_from(ops("_linalg_solve_ex.default _linalg_solve_ex.result"))
def SOLVE(self: TensorMeta, right: TensorMeta, left: bool, check_errors: bool, call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides in B; behind them _ _, _ n -> _ n, _ _, _, (), or the vector _."""
    if check_errors:
        return whole(call)
    vector = right.ndim == 1 or (self.ndim - 1 == right.ndim and self.shape[:-1] == right.shape)
    sides = "_" if vector else _sides(left=left)
    return matrices(call, f"_ _, {sides} -> {sides}, _ _, _, ()", partial=[linear("B", results=[0])])


def _sides(*, left: bool) -> str:
    """Where the right-hand sides of a system lie: columns, or rows where the matrix stands on the right."""
    return "_ n" if left else "n _"


@rule_from(ops("linalg_solve_triangular.default linalg_solve_triangular.out"))
def SOLVE_TRIANGULAR(call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides; behind them _ _, _ n -> _ n, or n _ where the matrix is right."""
    right = _sides(left=call.args["left"])
    return matrices(call, f"_ _, {right} -> {right}", partial=[linear("B")])


def _with_dense_pivots(local: LocalCall, lu: Any, pivots: Any, right: Any, **kwargs: Any) -> Any:
    """The local op. Torch's kernel takes the stride of the last batch dim for that from one row of pivots to the next,
    also where that dim has one element, and a shard of pivots that do not lie in order has another stride there.
    """
    return local.call.op(lu, pivots.clone(memory_format=torch.contiguous_format), right, **kwargs)


@rule_from(ops("linalg_lu_solve.default linalg_lu_solve.out"), lowering=_with_dense_pivots)
def LU_SOLVE(call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides; behind them _ _, _, _ n -> _ n, or n _ where the matrix is right."""
    right = _sides(left=call.args["left"])
    return matrices(call, f"_ _, _, {right} -> {right}", partial=[linear("B")], lowered="*")


@rule_from(ops("ormqr.default ormqr.out"))
def ORMQR(call: Call) -> Flow:
    """Batch dims pass, and the columns that are reflected; behind them _ _, _, _ n -> _ n, or n _ on the right."""
    right = _sides(left=call.args["left"])
    return matrices(call, f"_ _, _, {right} -> {right}", partial=[linear("input3")])


RULES = (
    SOLVE,
    SOLVE_TRIANGULAR,
    LU_SOLVE,
    ORMQR,
    on_batches("linalg_ldl_solve.default linalg_ldl_solve.out", "_ _, _, _ n -> _ n", partial=[linear("B")]),
    on_batches(
        "cholesky_solve.default cholesky_solve.out _cholesky_solve_helper.default _cholesky_solve_helper.out",
        "_ n, _ _ -> _ n",
        partial=[linear("self")],
    ),
    on_batches(
        "triangular_solve.default triangular_solve.X", "_ n, _ _ -> _ n, _ _", partial=[linear("self", results=[0])]
    ),
)
