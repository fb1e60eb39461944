"""What runs in place of a composite of torch. It is imported at its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["COMPOSITES"]


def _attention(*args: Any, **kwargs: Any) -> Any:
    from shardwise_matmul import math_attention

    return math_attention.one_op(*args, **kwargs)


# Where the function declines, the composite itself runs and makes a causal mask of its own.
COMPOSITES: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_attention_math.default: _attention,
}
