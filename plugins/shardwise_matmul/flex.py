"""Flex attention, forward and backward: torch's operator of higher order, whose scores and mask are functions.

Batch and heads may be sharded; so may the query sequence with keys and values whole, in whole blocks of the block mask.
The functions are given the places of the whole tensor: a rank adds to the indices where its shard starts. Tensors that
they capture are whole. The key sequence is whole.

A rule describes tensors and numbers, so each operator becomes an op of this plugin, and its functions go beside it
(flex_functions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, TensorMeta, rule_from
from shardwise_matmul.flex_functions import Parts, filled, functions_in_force, using
from shardwise_matmul.flex_kernels import results_without_values, run, run_backward
from shardwise_matmul.flex_masks import check_size, part_of_mask

__all__ = ["RULES", "attention", "attention_backward"]

_LIBRARY: Any = torch.library.Library("shardwise", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] captured, Tensor[] blocks, float scale,"
    " int? block) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor grad_out,"
    " Tensor grad_logsumexp, Tensor[] captured, Tensor[] blocks, float scale, int? block, int[] differentiable)"
    " -> Tensor[]"
)
_OPS = torch.ops.shardwise


# -- in place of the operators ---------------------------------------------------------------------------------------


def attention(  # noqa: PLR0913, PLR0917  # the operator's own arguments
    call: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Any:
    """What runs in place of the operator: its arguments, on a mesh."""
    check_size(block_mask, query)
    parts = Parts.of(score_mod, None, block_mask, kernel_options, score_mod_other_buffers, mask_mod_other_buffers)
    key, value = (_for_batch(t, query) for t in (key, value))
    with using(parts.functions):
        return call(
            _OPS.flex_attention.default, query, key, value, parts.captured, parts.blocks, float(scale), parts.block
        )


def attention_backward(  # noqa: PLR0913, PLR0917  # the operator's own arguments
    call: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    fw_graph: Callable[..., Any],
    joint_graph: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Any:
    """What runs in place of the operator's backward: its arguments, on a mesh."""
    check_size(block_mask, query)
    parts = Parts.of(fw_graph, joint_graph, block_mask, kernel_options, score_mod_other_buffers, mask_mod_other_buffers)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_logsumexp = torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp
    places = parts.functions.score_places
    differentiable = [i for i in places if i is not None and parts.captured[i].requires_grad]
    operands = query, _for_batch(key, query), _for_batch(value, query), out, logsumexp, grad_out, grad_logsumexp
    with using(parts.functions):
        grads = call(
            _OPS.flex_attention_backward.default,
            *operands,
            parts.captured,
            parts.blocks,
            float(scale),
            parts.block,
            differentiable,
        )
    of_captured = dict(zip(differentiable, grads[3:], strict=True))
    of_key, of_value = (
        grad.sum(0, keepdim=True) if t.shape[0] != grad.shape[0] else grad
        for t, grad in ((key, grads[1]), (value, grads[2]))
    )
    return grads[0], of_key, of_value, tuple(None if i is None else of_captured.get(i) for i in places)


def _for_batch(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values of one batch element serve every query."""
    return tensor.expand(query.shape[0], -1, -1, -1) if tensor.shape[0] == 1 != query.shape[0] else tensor


# -- on local tensors ------------------------------------------------------------------------------------------------


def _locally(
    local: LocalCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    blocks: Sequence[Tensor],
    scale: float,
    block: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    functions = functions_in_force(query, key).at(local.offset(local.spec("query"))[:3])
    mask = part_of_mask(local, filled(functions.mask, blocks), block)
    return run(functions, mask, query, key, value, captured, scale)


def _backward_locally(local: LocalCall, *args: Any) -> list[Tensor]:
    *operands, captured, blocks, scale, block, differentiable = args
    query, key = operands[:2]
    functions = functions_in_force(query, key).at(local.offset(local.spec("query"))[:3])
    mask = part_of_mask(local, filled(functions.mask, blocks), block)
    return run_backward(functions, mask, operands, captured, scale, differentiable)


# -- on whole tensors ------------------------------------------------------------------------------------------------


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    blocks: Sequence[Tensor],
    scale: float,
    _block: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    functions = functions_in_force(query, key)
    return run(functions, filled(functions.mask, blocks), query, key, value, captured, scale)


def _whole_backward(*args: Any) -> list[Tensor]:
    *operands, captured, blocks, scale, _, differentiable = args
    functions = functions_in_force(*operands[:2])
    return run_backward(functions, filled(functions.mask, blocks), operands, captured, scale, differentiable)


def _meta(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return results_without_values(query, value)


def _meta_backward(*args: Any) -> list[Tensor]:
    query, key, value, *_, captured, _, _, _, differentiable = args
    grads = [results_without_values(t, t)[0] for t in (query, key, value)]
    return [*grads, *(torch.empty_like(captured[i], memory_format=torch.contiguous_format) for i in differentiable)]


for name, whole, meta in (
    ("flex_attention", _whole, _meta),
    ("flex_attention_backward", _whole_backward, _meta_backward),
):
    _LIBRARY.impl(name, whole, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, meta, "Meta")


# -- rules -----------------------------------------------------------------------------------------------------------


def _flow(call: Call, results: Callable[[Any, Any, Any], list[Any]]) -> Flow:
    query, key = call.args["query"], call.args["key"]
    heads, of_key = _heads(query, key)
    positions = _positions(query, call.args["block"])
    of_query, of_keys = ["b", heads, positions, None], ["b", of_key, None, None]
    described = {
        "query": of_query,
        "key": of_keys,
        "value": of_keys,
        "out": of_query,
        "logsumexp": of_query[:3],
        "grad_out": of_query,
        "grad_logsumexp": of_query[:3],
    }
    names = ("b", "h", "q")
    return Flow(
        [described.get(name) for name in call.operand_names],
        results(of_query, of_keys, call),
        reduce=dict.fromkeys(names, "sum"),
        replicate=("g", "w"),
        lowered=("*", "R"),
    )


def _heads(query: TensorMeta, key: TensorMeta) -> tuple[Any, Any]:
    """Labels of query heads and key heads: a group of query heads goes with its key head."""
    many, few = query.shape[1], key.shape[1]
    if many == few:
        return "h", "h"
    if few == 1:
        return "h", None
    return (("h", few), ("g", many // few)), "h"


def _positions(query: TensorMeta, block: int | None) -> Any:
    """Label of the query positions: sharded in whole blocks of the mask, anywhere without one (``None``)."""
    if block is None:
        return "q"
    if not block or query.shape[2] % block:
        return None
    return (("q", query.shape[2] // block), ("w", block))


@rule_from(_OPS.flex_attention.default, lowering=_locally)
def FLEX(call: Call) -> Flow:
    """Named dims b h q e, b h s e, b h s v -> b h q v, b h q, b h q; s is whole, and what the functions capture."""
    return _flow(call, lambda of_query, _keys, _call: [of_query, of_query[:3], of_query[:3]])


@rule_from(_OPS.flex_attention_backward.default, lowering=_backward_locally)
def FLEX_BACKWARD(call: Call) -> Flow:
    """As forward; gradients of what every shard used whole are partial sums: captured tensors, keys and values."""
    return _flow(
        call,
        lambda of_query, of_keys, call: [of_query, of_keys, of_keys, *[[None] * m.ndim for m in call.outputs[3:]]],
    )


RULES = (FLEX, FLEX_BACKWARD)
