"""Products added to another tensor: ``beta * self + alpha * product``, and ``linear``, where the addend is a bias.

The trap is the addend of a partial product. Where it is partial too it adds up as it should; where every rank has
it whole, it must be added by one rank only, which is what the lowerings see to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.rule import REPLICATE, Call, Flow, LocalCall, Rule, TensorMeta, einop, partial, rule, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten

# Affine in the addend, bilinear in the factors. The addend of a partial sum is whole (lowered) or partial.
ADDED_ONCE = ("R, sum, R -> sum", "R, R, sum -> sum")
AFFINE = (
    "sum, sum, R -> sum",
    "sum, R, sum -> sum",
    "avg, R, R -> avg",
    "R, avg, R -> avg",
    "R, R, avg -> avg",
    "avg, avg, R -> avg",
    "avg, R, avg -> avg",
)


def _adds(local: LocalCall, addend: int) -> bool:
    """Whether this rank adds that operand: the first along every mesh dim that sums copies of a whole one."""
    result, whole = local.outputs[0], local.inputs[addend]
    assert result is not None
    assert whole is not None
    for mesh_dim, index in enumerate(local.coordinate):
        if index and result.placements[mesh_dim] == partial("sum") and whole.placements[mesh_dim] == REPLICATE:
            return False
    return True


def _add_once(local: LocalCall, *args: object, beta: complex, **kwargs: object) -> torch.Tensor:
    # With beta=0 the addend is not even read, so its NaNs count once too.
    added: torch.Tensor = local.call.op(*args, beta=beta if _adds(local, 0) else 0, **kwargs)
    return added


def _bias_last(row: str) -> str:
    """A row of the family with the addend as the last operand, as ``linear`` has it."""
    operands, _, made = row.partition(" -> ")
    addend, *factors = operands.split(", ")
    return f"{', '.join([*factors, addend])} -> {made}"


def _bias_once(
    local: LocalCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    added: torch.Tensor = aten.linear.default(x, weight, bias if bias is None or _adds(local, 2) else None)
    return added


def _added(ops: Sequence[Any], notation: str, contracted: str = "") -> Rule:
    """One rule of the family: addend, first factor, second factor; ``contracted`` names the dims summed over."""
    return rule(ops, notation, lowering=_add_once, **_options(contracted))


def _options(contracted: str) -> dict[str, Any]:
    names = contracted.split()
    return {
        "reduce": dict.fromkeys(names, "sum"),
        "partial": [*(f"sum, {name}, {name} -> sum" for name in names), *AFFINE, *ADDED_ONCE],
        "lowered": [*names, *ADDED_ONCE],
    }


# Without the dtype overloads: their meta kernels raise (addmm's in torch 2.11, baddbmm's still in 2.13), so no call of
# them can be planned.
ADDMM = _added([aten.addmm.default, aten.addmm_.default, aten.addmm.out], "m n, m k, k n -> m n", "k")
BADDBMM = _added([aten.baddbmm.default, aten.baddbmm_.default, aten.baddbmm.out], "b m n, b m k, b k n -> b m n", "k")
ADDBMM = _added([aten.addbmm.default, aten.addbmm_.default, aten.addbmm.out], "m n, b m k, b k n -> m n", "b k")


@rule_from([aten.addmv.default, aten.addmv_.default, aten.addmv.out], lowering=_add_once)
def ADDMV(self: TensorMeta, mat: TensorMeta) -> Callable[[Call], Flow]:
    """Named dims m, m k, k -> m; whole when the addend is broadcast, for then addmv on a short shard forgets to."""
    if self.shape != mat.shape[:1]:
        return lambda _: Flow([None], [None])
    return einop("m, m k, k -> m", **_options("k"))


ADDR = _added([aten.addr.default, aten.addr_.default, aten.addr.out], "m n, m, n -> m n")

# The activation is not linear: nothing partial comes in or goes out.
ADDMM_ACTIVATION = rule(
    [aten._addmm_activation.default, aten._addmm_activation.out], "m n, m k, k n -> m n", replicate=["k"]
)

LINEAR = rule(
    aten.linear.default,  # composite: inference mode alone gets here
    "... k, n k, n -> ... n",
    reduce={"k": "sum"},
    partial=["k, k, sum -> sum", *map(_bias_last, AFFINE), *map(_bias_last, ADDED_ONCE)],
    lowering=_bias_once,
    lowered=["k", *map(_bias_last, ADDED_ONCE)],
)

RULES = (ADDMM, BADDBMM, ADDBMM, ADDMV, ADDR, ADDMM_ACTIVATION, LINEAR)
