"""Values that one rank counts and the others do not (see :meth:`LocalCall.counts`), in eager mode and in a graph.

The graph that a rank traces must have the calls of all ranks. Torch merges equal calls of a graph, collectives too: if
``x + 3`` were ``x + 0`` on one rank, that rank would send ``x`` and ``x + 3`` once for both, and the others would wait.
So a traced graph computes both values, and ``where`` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.kernel.signature import Op, signature
from shardwise.private_torch.tracing import is_traced

__all__ = ["call_if", "tensor_if", "tied_to"]


def tensor_if(counts: bool, value: torch.Tensor, neutral: Any) -> torch.Tensor:
    """``value`` on a rank that counts it, a tensor of the number ``neutral`` in its shape on another."""
    if is_traced(value):
        return torch.where(_flag(counts, value), value, torch.full_like(value, neutral))
    return value if counts else torch.full_like(value, neutral)


def call_if(counts: bool, op: Op, values: Sequence[Any], neutral: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
    """``op(*values, **named)`` on a rank that counts, ``op(*neutral, **named)`` on another.

    The two have the same tensors and other numbers. The op returns one tensor; it may write its first operand or
    ``out=``.
    """
    result: torch.Tensor
    first = next(v for v in values if isinstance(v, torch.Tensor))
    if not is_traced(first):
        result = op(*(values if counts else neutral), **named)
        return result
    written = named.get("out", first if signature(op).args[0].written else None)

    def call(operands: Sequence[Any]) -> torch.Tensor:
        if written is None:
            return op(*operands, **named)  # type: ignore[no-any-return]
        copy = written.clone()
        fresh = {name: copy if value is written else value for name, value in named.items()}
        return op(*(copy if v is written else v for v in operands), **fresh)  # type: ignore[no-any-return]

    result = torch.where(_flag(counts, first), call(values), call(neutral))
    return result if written is None else written.copy_(result)


def _flag(counts: bool, like: torch.Tensor) -> torch.Tensor:
    return like.new_full((), counts, dtype=torch.bool)


def tied_to(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``value``, which a rank has in place of what other ranks compute from ``source``, as a result of ``source``.

    A constant in a graph belongs to no input. A compiler would merge what this rank sends of it with what it sends of
    another constant, or send it in the forward graph where the others send in the backward graph.
    """
    if not is_traced(source):
        return value
    octets = value.reshape(-1).view(torch.uint8)
    anything = (source.reshape(-1).view(torch.uint8) != 0).any()
    return torch.where(anything, octets, octets).view(value.dtype).view(value.shape)
