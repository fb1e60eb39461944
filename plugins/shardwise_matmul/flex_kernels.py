"""Flex attention on plain tensors, this rank's or the whole ones: torch's kernels, and results without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise_matmul.flex_functions import Functions, filled

__all__ = ["results_without_values", "run", "run_backward"]

FORWARD = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward


def _arguments(
    functions: Functions, mask: tuple[Any, ...], scale: float, captured: Sequence[Tensor]
) -> tuple[Any, ...]:
    return (
        mask,
        scale,
        functions.options,
        filled(functions.score_captured, captured),
        filled(functions.mask_captured, captured),
    )


def run(
    functions: Functions,
    mask: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the statistics of the operator's own forward."""
    if not query.numel():
        out, logsumexp, largest = results_without_values(query, value)
        return out, logsumexp.fill_(-torch.inf), largest.fill_(-torch.inf)
    query, key, value = map(_from_its_start, (query, key, value))
    mask = tuple(_from_its_start(part) if isinstance(part, Tensor) else part for part in mask)
    results: tuple[Tensor, Tensor, Tensor]
    results = FORWARD(query, key, value, functions.score, *_arguments(functions, mask, scale, captured))
    return results


def _from_its_start(tensor: Tensor) -> Tensor:
    """On a CPU, a copy of a tensor that may be a part of its memory.

    Of a view that is made in its graph, Inductor's CPU kernel reads the memory from the start, or takes the shape of
    the memory for the view's (torch 2.13).
    """
    begins_inside = isinstance(tensor.storage_offset(), torch.SymInt) or tensor.storage_offset() != 0
    if not tensor.is_cpu or (tensor.is_contiguous() and not begins_inside):
        return tensor
    # Inductor leaves a plain clone of what is contiguous out.
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.is_contiguous() else tensor.clone()


def run_backward(
    functions: Functions,
    mask: tuple[Any, ...],
    operands: Sequence[Tensor],
    captured: Sequence[Tensor],
    scale: float,
    differentiable: Sequence[int],
) -> list[Tensor]:
    """The gradients of query, key and value, and of the differentiable ones among the captured tensors."""
    query, key, value = operands[:3]
    if not query.numel():
        return [torch.zeros_like(t) for t in (query, key, value, *(captured[i] for i in differentiable))]
    # The kernel reads from a captured tensor whether it wants its gradient.
    captured = [t.detach().requires_grad_() if i in differentiable else t for i, t in enumerate(captured)]
    *grads, of_captured = BACKWARD(
        *operands, functions.score, functions.joint, *_arguments(functions, mask, scale, captured)
    )
    by_place = {i: grad for i, grad in zip(functions.score_places, of_captured, strict=True) if i is not None}
    # A function that ignores a tensor has no gradient for it.
    of_tensors = [by_place.get(i) for i in differentiable]
    return [
        *grads,
        *(torch.zeros_like(captured[i]) if g is None else g for i, g in zip(differentiable, of_tensors, strict=True)),
    ]


def results_without_values(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results without values. The result lies in memory as the query does, its last dim innermost."""
    shape = (*query.shape[:3], value.shape[3])
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    out = query.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    statistic = query.new_empty(query.shape[:3], dtype=dtype)
    return out, statistic, torch.empty_like(statistic)
