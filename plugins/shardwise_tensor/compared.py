"""Ops whose gradient compares an operand with the result.

They stand apart from their rules, whose modules are imported when they are first seen.
"""

from __future__ import annotations

import torch

__all__ = ["COMPARED"]

aten = torch.ops.aten

# The gradient of a largest or smallest value goes to the elements that equal it.
COMPARED = (
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
    aten.index_reduce.default,
    aten.index_reduce_.default,
    aten.segment_reduce.default,
)
