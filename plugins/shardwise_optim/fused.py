"""The fused optimizer steps: at each position all tensors have the same placement; step counters are whole."""

from __future__ import annotations

from shardwise.rule import signature
from shardwise_optim.positions import at_each_position, overloads

__all__ = ["RULES"]

# torch's meta device refuses the functional forms, and the out= forms return some states and write others: no program
# calls either.
STEPS = [op for op in overloads("_fused_adam _fused_adamw _fused_sgd _fused_adagrad") if signature(op).args[0].written]

RULES = (at_each_position(STEPS, whole=("state_steps",)),)
