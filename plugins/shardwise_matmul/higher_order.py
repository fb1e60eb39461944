"""The operators of higher order that this plugin has a function for. What runs them is imported at their first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["HIGHER_ORDER"]


def _attention(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from shardwise_matmul import flex

    return flex.attention(call, *args, **kwargs)


def _attention_backward(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from shardwise_matmul import flex

    return flex.attention_backward(call, *args, **kwargs)


HIGHER_ORDER: Mapping[Any, Callable[..., Any]] = {
    torch.ops.higher_order.flex_attention: _attention,
    torch.ops.higher_order.flex_attention_backward: _attention_backward,
}
