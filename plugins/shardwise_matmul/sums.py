"""Products added to another tensor: ``beta * self + alpha * product``, and ``linear``, where the addend is a bias.

The trap is the addend of a partial product. If it is partial too, it adds up as it should. If every rank has it whole,
only one rank may add it; the lowerings see to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.rule import (
    Call,
    Facts,
    Flow,
    LocalCall,
    Rule,
    TensorMeta,
    affine,
    einop,
    linear,
    multiply_matrices,
    neutral,
    rule,
    rule_from,
    tensor_if,
    whole,
)
from shardwise_matmul import work
from shardwise_matmul.work import product

__all__ = ["RULES"]

aten = torch.ops.aten

# A partial product with a whole addend: the lowering adds the addend once.
ADDED_ONCE = ("R, sum, R -> sum", "R, R, sum -> sum")


def _adds(local: LocalCall, addend: int) -> bool:
    """Whether this rank adds that operand."""
    result = local.outputs[0]
    assert result is not None
    return local.counts(result, local.inputs[addend])


def _add_once(local: LocalCall, *args: object, beta: complex, **kwargs: object) -> torch.Tensor:
    def add() -> torch.Tensor:
        # With beta=0 the addend is not even read, so its NaNs count once too.
        total: torch.Tensor = local.call.op(*args, beta=beta if _adds(local, 0) else 0, **kwargs)
        return total

    return multiply_matrices(local, *args, run=add, beta=beta, **kwargs)


def _bias_once(
    local: LocalCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    def add() -> torch.Tensor:
        counted = bias if bias is None else tensor_if(_adds(local, 2), bias, neutral("sum", bias.dtype))
        total: torch.Tensor = aten.linear.default(x, weight, counted)
        return total

    return multiply_matrices(local, x, weight, bias, run=add)


def _added(ops: Sequence[Any], notation: str, factors: str, contracted: str = "") -> Rule:
    """One rule of the family: addend, first factor, second factor; ``contracted`` names the dims summed over."""
    names = contracted.split()
    return rule(
        ops,
        notation,
        reduce=dict.fromkeys(names, "sum"),
        partial=[f"sum, {name}, {name} -> sum" for name in names],
        lowering={(*names, *ADDED_ONCE, _facts("self", factors)): _add_once},
        scattered="*",
        work=product,
    )


def _facts(addend: str, factors: str) -> Facts:
    """Affine in each operand, and linear in the addend together with one factor."""
    first, second = factors.split()
    return affine(addend, first, second) + linear(f"{addend} {first}", f"{addend} {second}")


# Without the dtype overloads: their meta kernels raise (addmm's in torch 2.11, baddbmm's still in 2.13), so no call of
# them can be planned.
ADDMM = _added([aten.addmm.default, aten.addmm_.default, aten.addmm.out], "m n, m k, k n -> m n", "mat1 mat2", "k")
BADDBMM = _added(
    [aten.baddbmm.default, aten.baddbmm_.default, aten.baddbmm.out],
    "b m n, b m k, b k n -> b m n",
    "batch1 batch2",
    "k",
)
ADDBMM = _added(
    [aten.addbmm.default, aten.addbmm_.default, aten.addbmm.out], "m n, b m k, b k n -> m n", "batch1 batch2", "b k"
)


@rule_from([aten.addmv.default, aten.addmv_.default, aten.addmv.out], lowering=_add_once)
def ADDMV(self: TensorMeta, mat: TensorMeta) -> Callable[[Call], Flow]:
    """Named dims m, m k, k -> m; whole if the addend broadcasts, since addmv does not broadcast it on a short shard."""
    if self.shape != mat.shape[:1]:
        return whole
    return einop(
        "m, m k, k -> m",
        reduce={"k": "sum"},
        partial=["sum, k, k -> sum", _facts("self", "mat vec")],
        lowered=("k", *ADDED_ONCE, _facts("self", "mat vec")),
        scattered="*",
    )


ADDR = _added([aten.addr.default, aten.addr_.default, aten.addr.out], "m n, m, n -> m n", "vec1 vec2")

# The activation is not linear: nothing partial comes in or goes out.
ADDMM_ACTIVATION = rule(
    [aten._addmm_activation.default, aten._addmm_activation.out], "m n, m k, k n -> m n", replicate=["k"]
)

LINEAR = rule(
    aten.linear.default,  # composite: inference mode alone gets here
    "... k, n k, n -> ... n",
    reduce={"k": "sum"},
    partial=["k, k, sum -> sum"],
    lowering={("k", "sum, R, R -> sum", "R, sum, R -> sum", _facts("bias", "input weight")): _bias_once},
    scattered="*",
    work=work.linear,
)

RULES = (ADDMM, BADDBMM, ADDBMM, ADDMV, ADDR, ADDMM_ACTIVATION, LINEAR)
