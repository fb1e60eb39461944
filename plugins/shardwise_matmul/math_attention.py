"""Attention in its math form as one op. torch composes it of a dozen, each of which would be dispatched for itself.

torch's composite runs above autograd, so its parts are what a mesh sees, twice: forward and backward. In its place runs
an op of this plugin, whose kernel is that composite on local tensors, and whose gradients are one op more. The numbers
are those of the composite: the kernels take the same steps in the same order, in the same dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["BACKWARD", "FORWARD", "one_op"]

MATH = torch.ops.aten._scaled_dot_product_attention_math.default

_LIBRARY: Any = torch.library.Library("shardwise", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attention_math(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale,"
    " bool enable_gqa) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_math_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor weights, bool is_causal,"
    " float? scale) -> (Tensor, Tensor, Tensor)"
)
FORWARD = torch.ops.shardwise.attention_math.default
BACKWARD = torch.ops.shardwise.attention_math_backward.default

_HALF = (torch.float16, torch.bfloat16)

# True while the composite itself is to run, as a second derivative needs it.
_in_parts: ContextVar[bool] = ContextVar("shardwise_attention_in_parts", default=False)


@contextmanager
def _parts() -> Iterator[None]:
    token = _in_parts.set(True)
    try:
        yield
    finally:
        _in_parts.reset(token)


# -- in place of the composite ---------------------------------------------------------------------------------------


def one_op(  # noqa: PLR0913  # the arguments of the op that it stands for
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``(result, weights)``, by one op. ``NotImplemented`` where the composite has to run: with dropout, a mask that
    needs a gradient, forward-mode derivatives, or in compiled code, which had better see the parts.
    """
    if _in_parts.get() or dropout_p or dropout_mask is not None or torch.compiler.is_compiling():
        return NotImplemented
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if len({t.dtype for t in tensors[:3]}) > 1 or _needs_parts(attn_mask, query.dtype):
        return NotImplemented
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):  # type: ignore[no-untyped-call]
        return NotImplemented
    differentiable = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    run = _Attention.apply if differentiable else FORWARD
    result, weights = run(query, key, value, attn_mask, is_causal, scale, enable_gqa)  # type: ignore[no-untyped-call]
    return result, weights if weights.dtype == query.dtype else weights.to(query.dtype)


def _needs_parts(mask: Tensor | None, dtype: torch.dtype) -> bool:
    if mask is not None and mask.requires_grad:
        return True
    # By default torch computes in float32 what comes in half precision, and so does the kernel below.
    return dtype in _HALF and torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]


# -- on local tensors ------------------------------------------------------------------------------------------------


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = query.float(), key.float(), value.float()
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    result, weights = MATH(query, key, value, mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa)
    return result if result.dtype == dtype else result.to(dtype), weights


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
    is_causal: bool,  # the weights have it; the rule needs it
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    if dtype in _HALF:
        grad, query, key, value = grad.float(), query.float(), key.float(), value.float()
    # As torch does: the root of the scale goes to either factor, so that no product is out of range, and its sign to
    # the queries.
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    root = math.sqrt(abs(scale))
    signed = math.copysign(root, scale)
    keys, values = (_as_many_heads(t, query) for t in (key, value))
    by_value = weights.transpose(-2, -1) @ grad
    by_scores = torch.ops.aten._softmax_backward_data(grad @ values.transpose(-2, -1), weights, -1, weights.dtype)
    by_query = (by_scores @ (keys * root)) * signed
    by_key = ((query * signed).transpose(-2, -1) @ by_scores).transpose(-2, -1) * root
    gradients = (_of_heads(by_query, query), _of_heads(by_key, key), _of_heads(by_value, value))
    return gradients if dtype == query.dtype else tuple(t.to(dtype) for t in gradients)  # type: ignore[return-value]


def _as_many_heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, each head as often as it has query heads."""
    many = query.shape[-3] if query.ndim > 2 else 1  # noqa: PLR2004  # heads come third
    few = x.shape[-3] if x.ndim > 2 else 1  # noqa: PLR2004
    return x if few in {many, 1} else x.repeat_interleave(many // few, dim=-3)


def _of_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """The sum of the gradients of what :func:`_as_many_heads` and broadcasting made of ``x``."""
    if gradient.shape == x.shape:
        return gradient
    if x.ndim > 2 and gradient.shape[-3] != x.shape[-3] > 1:  # noqa: PLR2004
        few = x.shape[-3]
        gradient = gradient.reshape(*gradient.shape[:-3], few, -1, *gradient.shape[-2:]).sum(-3)
    return gradient.sum_to_size(x.shape)


_LIBRARY.impl("attention_math", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_math_backward", _backward, "CompositeExplicitAutograd")


# -- gradients -------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """The op with its gradients. A function of autograd's own costs less than what ``torch.library`` makes of two."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        query, key, value, mask, ctx.is_causal, ctx.scale, ctx.enable_gqa = arguments
        result, weights = FORWARD(*arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, mask, weights)
        return result, weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, weights = ctx.saved_tensors
        by: tuple[Tensor | None, ...] = (None,) * 3
        if torch.is_grad_enabled() or grad_weights is not None:
            by = _in_torch(ctx, (query, key, value), mask, (grad, grad_weights))
        elif grad is not None:
            by = BACKWARD(grad, query, key, value, weights, ctx.is_causal, ctx.scale)
        return (*by, None, None, None, None)


def _in_torch(
    ctx: Any, operands: tuple[Tensor, ...], mask: Tensor | None, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients by torch's own formulas, which have derivatives of their own."""
    again = torch.is_grad_enabled()
    with _parts(), torch.enable_grad():
        operands = tuple(t if again and t.requires_grad else t.detach().requires_grad_() for t in operands)
        results = MATH(*operands, mask, 0.0, ctx.is_causal, None, scale=ctx.scale, enable_gqa=ctx.enable_gqa)
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        if not pairs:
            return (None,) * len(operands)
        outs, given = zip(*pairs, strict=True)
        return torch.autograd.grad(outs, operands, given, create_graph=again, allow_unused=True)
