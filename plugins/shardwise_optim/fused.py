"""The fused optimizer steps: parameters, gradients and states lie alike at each position, step counters are whole."""

from __future__ import annotations

from shardwise.signature import signature
from shardwise_optim.positions import at_each_position, overloads

__all__ = ["RULES"]

# The functional and the out= forms return new states or write some of them only; nothing calls them.
STEPS = [
    op
    for op in overloads("_fused_adam _fused_adamw _fused_sgd _fused_adagrad")
    if signature(op).args[0].written
]

RULES = (at_each_position(STEPS, whole=("state_steps",)),)
