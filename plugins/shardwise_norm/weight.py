"""Weight norm: each slice of a weight along one dim has a norm of its own, so that dim may be sharded."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, row_major, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


# Not their out=, which torch cannot plan.
@rule_from([aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default], results=row_major)
def weight_norm(call: Call) -> Flow:
    """The dim whose slices are normalised; weights, lengths and norms follow it."""
    first = call.operands[0]
    assert first is not None
    dim = call.args["dim"] % first.ndim
    names = tuple("d" if d == dim else None for d in range(first.ndim))
    return Flow([names], [names], nonempty={"d"})


RULES = (weight_norm,)
