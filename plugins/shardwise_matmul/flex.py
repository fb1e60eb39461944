"""Flex attention, forward and backward: torch's operator of higher order, whose scores and mask are functions.

Batch and heads may be sharded; so may the query sequence with keys and values whole, in whole blocks of the block mask.
The functions are given the places of the whole tensor: a rank adds to the indices where its shard starts. Tensors that
they capture are whole. The key sequence is whole.

A rule describes tensors and numbers, so each operator becomes an op of this plugin, and its functions come to the op's
lowering by a context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from shardwise.errors import NoStrategyError
from shardwise.rule import Call, Flow, LocalCall, TensorMeta, rule_from

__all__ = ["RULES", "attention", "attention_backward"]

FORWARD = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward

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

# A block mask as a tuple: two lengths; the key blocks of each query block, partial ones and full ones; the query blocks
# of each key block, likewise; the order of writes in the backward; the sizes of a block of queries and of keys; the
# function.
_BY_QUERY = (2, 3, 4, 5)
_BY_KEY = ((6, 7), (8, 9))
_WRITE_ORDER = slice(10, -3)
_QUERY_BLOCK, _FUNCTION = -3, -1
# The size of a block of the mask that torch makes where none is given.
_WHOLE = 1 << 30


# -- the functions of a call -----------------------------------------------------------------------------------------


@frozen
class _Place:
    """Stands for a tensor of a list: what is no tensor stays in its place."""

    index: int


@frozen(eq=False)
class _Functions:
    """What a call has besides tensors and numbers. ``score`` and ``mask`` take indices and then captured values.

    ``joint`` is the gradient of ``score``, in a backward. Tensors among the captured values and in the block mask are
    places in the op's lists.
    """

    score: Callable[..., Any]
    joint: Callable[..., Any] | None
    mask: tuple[Any, ...]
    score_captured: tuple[Any, ...] = ()
    mask_captured: tuple[Any, ...] = ()
    options: dict[str, Any] = field(factory=dict)

    def at(self, first: Sequence[Any]) -> _Functions:
        """The functions of a shard of the queries that starts there: batch, head, position."""
        if not any(isinstance(n, torch.SymInt) or n for n in first):
            return self
        mask = (*self.mask[:_FUNCTION], _shifted(self.mask[_FUNCTION], 0, first))
        joint = None if self.joint is None else _shifted(self.joint, 1, first)
        return evolve(self, score=_shifted(self.score, 1, first), joint=joint, mask=mask)


def _shifted(function: Callable[..., Any], before: int, first: Sequence[Any]) -> Callable[..., Any]:
    """The function of global indices, called with those of a shard; ``before`` arguments come first."""

    def of_shard(*args: Any) -> Any:
        indices = args[before : before + len(first)]
        return function(
            *args[:before], *(i + n for i, n in zip(indices, first, strict=True)), *args[before + len(first) :]
        )

    return of_shard


def _same_score(score: Any, *_: Any) -> Any:
    return score


def _no_mask(batch: Any, *_: Any) -> Any:
    return batch.new_ones((), dtype=torch.bool)


def _unmasked(queries: int, keys: int) -> tuple[Any, ...]:
    return (queries, keys, *[None] * 12, _WHOLE, _WHOLE, _no_mask)


_functions: ContextVar[_Functions | None] = ContextVar("functions of flex attention", default=None)


@contextmanager
def _using(functions: _Functions) -> Iterator[None]:
    token = _functions.set(functions)
    try:
        yield
    finally:
        _functions.reset(token)


def _in_force(query: Tensor, key: Tensor) -> _Functions:
    """The functions of this call; of an op that is called by itself, those that change nothing."""
    functions = _functions.get()
    return _Functions(_same_score, None, _unmasked(query.shape[2], key.shape[2])) if functions is None else functions


def _filled(values: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple(tensors[v.index] if isinstance(v, _Place) else v for v in values)


def _taken(values: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """The values with places for their tensors, which go to the end of a list."""
    left: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            left.append(_Place(len(tensors)))
            tensors.append(value)
        else:
            left.append(value)
    return tuple(left)


# -- in place of the operators ---------------------------------------------------------------------------------------


@frozen
class _Parts:
    """One call of an operator as an op's arguments."""

    functions: _Functions
    captured: list[Tensor]
    blocks: list[Tensor]
    block: int | None

    @classmethod
    def of(
        cls,
        score: Callable[..., Any],
        joint: Callable[..., Any] | None,
        mask: tuple[Any, ...],
        options: dict[str, Any],
        score_captured: Sequence[Any],
        mask_captured: Sequence[Any],
    ) -> _Parts:
        captured: list[Tensor] = []
        blocks: list[Tensor] = []
        functions = _Functions(
            score,
            joint,
            (*_taken(mask[:_FUNCTION], blocks), mask[_FUNCTION]),
            _taken(score_captured, captured),
            _taken(mask_captured, captured),
            options,
        )
        # An order of writes belongs to all queries of the mask: they stay whole.
        ordered = any(part is not None for part in mask[_WRITE_ORDER])
        block = 0 if ordered else None if mask[_QUERY_BLOCK] >= _WHOLE else int(mask[_QUERY_BLOCK])
        return cls(functions, captured, blocks, block)


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
    _check_size(block_mask, query)
    parts = _Parts.of(score_mod, None, block_mask, kernel_options, score_mod_other_buffers, mask_mod_other_buffers)
    key, value = (_for_batch(t, query) for t in (key, value))
    with _using(parts.functions):
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
    _check_size(block_mask, query)
    parts = _Parts.of(
        fw_graph, joint_graph, block_mask, kernel_options, score_mod_other_buffers, mask_mod_other_buffers
    )
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_logsumexp = torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp
    places = [v.index if isinstance(v, _Place) else None for v in parts.functions.score_captured]
    differentiable = [i for i in places if i is not None and parts.captured[i].requires_grad]
    operands = query, _for_batch(key, query), _for_batch(value, query), out, logsumexp, grad_out, grad_logsumexp
    with _using(parts.functions):
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


def _check_size(mask: tuple[Any, ...], query: Tensor) -> None:
    """Refuse a block mask whose batch or heads are not those of the whole query: a rank could not tell its part."""
    numbers = mask[_BY_QUERY[0]]
    if numbers is None or all(n in (1, size) for n, size in zip(numbers.shape[:2], query.shape[:2], strict=True)):
        return
    # Traced for several sizes they are symbols; a message has the numbers.
    asked, found = ([int(n) for n in t.shape[:2]] for t in (query, numbers))
    raise NoStrategyError(
        asked=f"run flex_attention with a query of {asked[0]} batch elements and {asked[1]} heads",
        found=f"a block mask of {found[0]} batch elements and {found[1]} heads",
        do="Make the block mask for the whole query: create_block_mask with B and H of its global shape, or None.",
    )


def _for_batch(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values of one batch element serve every query."""
    return tensor.expand(query.shape[0], -1, -1, -1) if tensor.shape[0] == 1 != query.shape[0] else tensor


# -- on local tensors ------------------------------------------------------------------------------------------------


def _arguments(
    functions: _Functions, mask: tuple[Any, ...], scale: float, captured: Sequence[Tensor]
) -> tuple[Any, ...]:
    return (
        mask,
        scale,
        functions.options,
        _filled(functions.score_captured, captured),
        _filled(functions.mask_captured, captured),
    )


def _run(
    functions: _Functions,
    mask: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not query.numel():
        out, logsumexp, largest = _results(query, value)
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


def _run_backward(
    functions: _Functions,
    mask: tuple[Any, ...],
    operands: Sequence[Tensor],
    captured: Sequence[Tensor],
    scale: float,
    differentiable: Sequence[int],
) -> list[Tensor]:
    query, key, value = operands[:3]
    if not query.numel():
        return [torch.zeros_like(t) for t in (query, key, value, *(captured[i] for i in differentiable))]
    # The kernel reads from a captured tensor whether it wants its gradient.
    captured = [t.detach().requires_grad_() if i in differentiable else t for i, t in enumerate(captured)]
    *grads, of_captured = BACKWARD(
        *operands, functions.score, functions.joint, *_arguments(functions, mask, scale, captured)
    )
    places = [v.index if isinstance(v, _Place) else None for v in functions.score_captured]
    by_place = {i: grad for i, grad in zip(places, of_captured, strict=True) if i is not None}
    # A function that ignores a tensor has no gradient for it.
    of_tensors = [by_place.get(i) for i in differentiable]
    return [
        *grads,
        *(torch.zeros_like(captured[i]) if g is None else g for i, g in zip(differentiable, of_tensors, strict=True)),
    ]


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results without values. The result lies in memory as the query does, its last dim innermost."""
    shape = (*query.shape[:3], value.shape[3])
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    out = query.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    statistic = query.new_empty(query.shape[:3], dtype=dtype)
    return out, statistic, torch.empty_like(statistic)


def _blocks_of(
    local: LocalCall, functions: _Functions, blocks: Sequence[Tensor], queries: int, block: int | None
) -> tuple[Any, ...]:
    """The part of the block mask for this rank's queries."""
    spec = local.spec("query")
    first, sizes = local.offset(spec), local.local_shape(spec)

    def narrow(tensor: Tensor) -> Tensor:
        for dim in (0, 1):  # a dim of one element serves all
            if tensor.dim() > dim and tensor.shape[dim] != 1:
                tensor = tensor.narrow(dim, first[dim], sizes[dim])
        return tensor

    mask = list(_filled(functions.mask[:_FUNCTION], [narrow(t) for t in blocks]))
    if sizes[2] == spec.shape[2] or not block:
        return (*mask, functions.mask[_FUNCTION])
    start, count = first[2] // block, -(-sizes[2] // block)
    for i in _BY_QUERY:
        if mask[i] is not None:
            mask[i] = mask[i].narrow(2, start, count)
    for numbers, indices in _BY_KEY:
        if mask[numbers] is not None:
            mask[numbers], mask[indices] = _columns(mask[numbers], mask[indices], start, count)
    mask[0] = sizes[2]
    return (*mask, functions.mask[_FUNCTION])


def _columns(numbers: Tensor, indices: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Some columns of a sparse matrix: per row, how many columns it has, and which, those that count in front."""
    columns = torch.arange(indices.shape[-1], device=indices.device)
    counted = columns < numbers.unsqueeze(-1)
    dense = torch.zeros_like(indices).scatter_add(-1, indices.long(), counted.to(indices.dtype))
    part = dense.narrow(-1, start, count)
    order = part.argsort(dim=-1, descending=True, stable=True)
    return part.sum(-1, dtype=numbers.dtype), order.to(indices.dtype)


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
    functions = _in_force(query, key).at(local.offset(local.spec("query"))[:3])
    mask = _blocks_of(local, functions, blocks, query.shape[2], block)
    return _run(functions, mask, query, key, value, captured, scale)


def _backward_locally(local: LocalCall, *args: Any) -> list[Tensor]:
    *operands, captured, blocks, scale, block, differentiable = args
    query, key = operands[:2]
    functions = _in_force(query, key).at(local.offset(local.spec("query"))[:3])
    mask = _blocks_of(local, functions, blocks, query.shape[2], block)
    return _run_backward(functions, mask, operands, captured, scale, differentiable)


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
    functions = _in_force(query, key)
    return _run(functions, _filled(functions.mask, blocks), query, key, value, captured, scale)


def _whole_backward(*args: Any) -> list[Tensor]:
    *operands, captured, blocks, scale, _, differentiable = args
    functions = _in_force(*operands[:2])
    return _run_backward(functions, _filled(functions.mask, blocks), operands, captured, scale, differentiable)


def _meta(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(query, value)


def _meta_backward(*args: Any) -> list[Tensor]:
    query, key, value, *_, captured, _, _, _, differentiable = args
    grads = [_results(t, t)[0] for t in (query, key, value)]
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
