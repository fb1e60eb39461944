"""Products of matrices and vectors. They are bilinear: one operand at a time may be a partial sum or average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.rule import Call, Flow, TensorMeta, einop, linear, multiply_matrices, rule, rule_from
from shardwise_matmul.work import product

__all__ = ["RULES"]

aten = torch.ops.aten

# Without dtype_out: bmm's has no meta kernel in torch 2.11, so no call of it can be planned.
MM = rule(
    [aten.mm.default, aten.mm.out, aten.mm.dtype],
    "m k, k n -> m n",
    reduce={"k": "sum"},
    lowering={linear("self", "mat2"): multiply_matrices},
    work=product,
)

BMM = rule(
    [aten.bmm.default, aten.bmm.out, aten.bmm.dtype],
    "b m k, b k n -> b m n",
    reduce={"k": "sum"},
    lowering={linear("self", "mat2"): multiply_matrices},
    work=product,
)

MV = rule(
    [aten.mv.default, aten.mv.out],
    "m k, k -> m",
    reduce={"k": "sum"},
    lowering={linear("self", "vec"): multiply_matrices},
)

DOT = rule(
    [aten.dot.default, aten.dot.out, aten.vdot.default, aten.vdot.out],
    "k, k -> ()",
    reduce={"k": "sum"},
    lowering={linear("self", "tensor|other"): multiply_matrices},
)


@rule_from(aten.matmul.default, lowering=multiply_matrices, work=product)
def MATMUL(self: TensorMeta, other: TensorMeta) -> Callable[[Call], Flow]:
    """Named dims ... m k, ... k n -> ... m n, without those that a vector lacks; inference mode alone gets here."""
    left, m = ("... m k", " m") if self.ndim > 1 else ("k", "")
    right, n = ("... k n", " n") if other.ndim > 1 else ("k", "")
    result = f"...{m}{n}" if m or n else "()"
    return einop(
        f"{left}, {right} -> {result}",
        reduce={"k": "sum"},
        partial=[linear("self", "other")],
        lowered=linear("self", "other"),
    )


@rule_from([aten._trilinear.default, aten._trilinear.out])
def TRILINEAR(call: Call) -> Flow:
    """Any dim of the broadcast operands; one that is summed over gives a partial sum. Linear in each of the three."""
    args = call.args
    gone = args["sumdim"]
    labels = [_inserted(args[f"i{i}"], args[f"expand{i}"]) for i in (1, 2, 3)]
    ndim = args["i1"].ndim + len(args["expand1"])
    result = [f"d{d}" for d in range(ndim) if d not in gone]
    return Flow(labels, [result], reduce={f"d{d}": "sum" for d in gone}, linear=("i3", "i2", "i1"))


def _inserted(x: TensorMeta, new: Sequence[int]) -> list[str]:
    """The dims of ``x`` by their place among the broadcast dims, of which it lacks those in ``new``."""
    return [f"d{d}" for d in range(x.ndim + len(new)) if d not in new]


BLOCK_DIAG = rule(
    [aten.block_diag.default, aten.block_diag.out],
    "R -> R",
    linear="tensors",
)

RULES = (MM, BMM, MV, DOT, MATMUL, TRILINEAR, BLOCK_DIAG)
