"""The fused optimizer steps: parameters, gradients and states lie alike at each position, step counters are whole."""

from __future__ import annotations

from shardwise.signature import signature
from shardwise_optim.positions import at_each_position, overloads

__all__ = ["RULES"]

# The out= forms write some states in place and return others; nothing calls them.
STEPS = [
    op
    for op in overloads("_fused_adam _fused_adamw _fused_sgd _fused_adagrad")
    if not any(arg.is_out for arg in signature(op).args)
]

RULES = (at_each_position(STEPS, whole=("state_steps",)),)
