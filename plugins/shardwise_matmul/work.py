"""Floating-point operations of products and of attention, for planning. A multiplication and an addition are two."""

from __future__ import annotations

from shardwise.rule import Call, TensorMeta

__all__ = ["attention", "attention_backward", "linear", "product"]


def product(call: Call) -> float:
    """Each element of the first factor meets a row of the second one: ``2 m k n``, for each matrix of a batch."""
    first, second = _factors(call)
    return 2.0 * first.numel * int(second.shape[-1] if second.ndim > 1 else 1)


def linear(call: Call) -> float:
    """As :func:`product`; the weight has the dim of the result first."""
    x: TensorMeta = call.args["input"]
    weight: TensorMeta = call.args["weight"]
    return 2.0 * x.numel * int(weight.shape[0] if weight.ndim > 1 else 1)


def _factors(call: Call) -> tuple[TensorMeta, TensorMeta]:
    """The last two tensors: what is added to a product comes before them."""
    tensors = [meta for meta in call.operands if meta is not None]
    return tensors[-2], tensors[-1]


def attention(call: Call) -> float:
    """Scores of each query with each key, and the sum of the values by them. A causal mask is not counted."""
    query, key, value = _operands(call)
    return _scores(query, key) * (query.shape[-1] + value.shape[-1])


def attention_backward(call: Call) -> float:
    """The scores once more, and a product for the gradient of each factor: five in place of two."""
    query, key, value = _operands(call)
    return _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _operands(call: Call) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    return call.args["query"], call.args["key"], call.args["value"]


def _scores(query: TensorMeta, key: TensorMeta) -> float:
    return 2.0 * query.numel / max(query.shape[-1], 1) * key.shape[-2]
