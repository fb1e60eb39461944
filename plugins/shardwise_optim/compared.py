"""Ops whose gradient compares an operand with the result.

They stand apart from their rules, whose modules are imported when they are first seen.
"""

from __future__ import annotations

import torch

__all__ = ["COMPARED"]

aten = torch.ops.aten

# An infinite norm is a maximum.
COMPARED = (aten._foreach_norm.Scalar, aten._foreach_max.default)
