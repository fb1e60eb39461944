"""Ops whose gradient compares an operand with the result.

They stand apart from their rules, whose modules are imported when they are first seen.
"""

from __future__ import annotations

import torch

__all__ = ["COMPARED"]

aten = torch.ops.aten

# An infinite norm of differences is the largest.
COMPARED = (aten._cdist_forward.default, aten._pdist_forward.default)
