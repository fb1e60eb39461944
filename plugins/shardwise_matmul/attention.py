"""Scaled dot product attention, forward and backward, of every kernel that torch has for CPU and CUDA.

Batch and heads may be sharded; so may the query sequence with keys and values whole, when the mask is not causal. With
fewer key than query heads (grouped queries), a shard of query heads goes with its own key heads. The key sequence is
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from attrs import evolve

from shardwise.rule import Call, Facts, Flow, LocalCall, Row, Rows, TensorMeta, linear, rule_from
from shardwise_matmul import math_attention, work

__all__ = ["RULES"]

aten = torch.ops.aten

_Label = str | tuple[tuple[str, int], ...] | None

# What the last dims of a tensor are, by argument: query heads H, key heads K, query positions Q, the rest whole.
_QUERY, _KEY, _BIAS, _STATISTIC = "H Q E", "K S E", "H Q S", "H Q"
_ARGUMENTS = {
    "query": _QUERY,
    "key": _KEY,
    "value": _KEY,
    "attn_mask": _BIAS,
    "attn_bias": _BIAS,
    "dropout_mask": _BIAS,
    "grad_out": _QUERY,
    "grad_out_": _QUERY,
    "out": _QUERY,
    "logsumexp": _STATISTIC,
    "weights": _BIAS,
}
_RESULTS = (_QUERY, _STATISTIC)  # and tensors that do not depend on the shard: lengths, seeds, debugging
_RESULTS_OF_MATH = (_QUERY, _QUERY)  # the weights never broadcast
_GRADIENTS = (_QUERY, _KEY, _KEY, _BIAS)
_GRADIENTS_OF_MATH = _GRADIENTS[:3]

# The memory-efficient kernel pads the query dim of its logsumexp to a multiple of this (kAlignLSE in its CUDA source).
_BLOCK = 32
_PADDING = (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward)


# -- names of dims -----------------------------------------------------------------------------------------------


def _heads(query: TensorMeta, key: TensorMeta) -> tuple[_Label, _Label]:
    """Labels of query heads and key heads."""
    many, few = (meta.shape[-3] if meta.ndim > 2 else 1 for meta in (query, key))  # noqa: PLR2004  heads come third
    if many == few:
        return "h", "h"
    if few == 1:
        return "h", None
    if few == 0 or many % few:
        return None, None
    return (("h", few), ("r", many // few)), "h"


def _positions(call: Call, query: TensorMeta) -> _Label:
    """Label of the query positions: never sharded under a causal mask, which counts them from the start."""
    if call.args["is_causal"]:
        return None
    if call.op.overloadpacket not in _PADDING:
        return "q"
    blocks, rest = divmod(query.shape[-2], _BLOCK)
    return None if rest else (("q", blocks), ("w", _BLOCK))


def _named(
    meta: TensorMeta | None, last: str, labels: Mapping[str, _Label], *, gradient: bool = False
) -> list[_Label] | None:
    """Labels of one tensor: its last dims as described, those before as batch dims from the right."""
    if meta is None:
        return None
    words = last.split()
    if last == _STATISTIC:
        words += ["E"] * (meta.ndim - 3)  # cuDNN's has a size-1 dim at the end
    words = words[-meta.ndim :]
    batch = [f"b{i}" for i in range(meta.ndim - len(words), 0, -1)]
    of_dims: list[_Label] = [*batch, *(labels[word] for word in words)]
    # A size-1 dim of a mask is broadcast, and the gradient of a broadcast dim is a sum over all shards. A logsumexp
    # that the call does not need has no positions.
    absent = (0, 1) if last == _BIAS or gradient else (0,)
    return [None if n in absent else label for label, n in zip(of_dims, meta.shape, strict=True)]


def _flow(call: Call, described_results: Sequence[str], *, reduce: str, facts: Facts) -> Flow:
    """The flow of one attention call; ``reduce`` names the reduction of a result that lacks a sharded dim.

    It is long because it serves eight ops that order and name their operands differently: each tensor has its dims in
    words (``_ARGUMENTS``), which become labels here.
    """
    query, key = call.args["query"], call.args["key"]
    many, few = _heads(query, key)
    labels = {"H": many, "K": few, "Q": _positions(call, query), "S": None, "E": None}
    described = [_ARGUMENTS.get(name) for name in call.operand_names]
    pairs = zip(call.operands, described, strict=True)
    inputs = [None if last is None else _named(meta, last, labels) for meta, last in pairs]
    rest = [None] * (len(call.outputs) - len(described_results))
    results = zip(call.outputs, [*described_results, *rest], strict=False)
    outputs = [None if last is None else _named(meta, last, labels, gradient=reduce == "sum") for meta, last in results]
    names = {name for dims in inputs for label in dims or () for name in _factors(label)} - {"w", "r"}
    # Random numbers are drawn per element of the whole scores: with dropout nothing is sharded.
    random = bool(call.args.get("dropout_p"))
    return Flow(
        inputs,
        outputs,
        reduce=dict.fromkeys(names, reduce),
        replicate=names | {"w", "r"} if random else {"w", "r"},
        partial=() if random else [facts],
        nonempty=names,
    )


def _factors(label: _Label) -> list[str]:
    return [] if label is None else [label] if isinstance(label, str) else [name for name, _ in label]


# -- empty shards and lengths ------------------------------------------------------------------------------------


def _rows(flow: Flow) -> Callable[[Call], Rows]:
    """Each row twice: plain if no shard is empty, since the kernels refuse an empty one; else through the lowering."""
    return lambda call: Rows(tuple(row for plain in flow.bind(call).rows for row in _variants(call, plain)))


def _variants(call: Call, row: Row) -> Iterator[Row]:
    if call.args.get("dropout_p"):
        # Only the whole row draws, and through the lowering: this chooses the random numbers.
        yield evolve(row, nonempty=(), lowered=True)
        return
    # An op that returns the sequence lengths must return those of the whole tensors.
    has_lengths = any(not result.is_tensor for result in call.signature.results)
    if not (has_lengths and row.name == "shard q"):
        yield row
    if row.nonempty:
        yield evolve(row, nonempty=(), lowered=True)


def _locally(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The local op if this rank has queries, else results without elements (or of zeros)."""
    results = local.call.signature.results
    query = args[local.call.signature.index("query") or 0]
    if query.numel():
        values = local.call.op(*args, **kwargs)
    else:
        blank = _blank(local, query)
        values = tuple(next(blank) if result.is_tensor else None for result in results)
    lengths = iter([local.arg("query").shape[-2], local.arg("key").shape[-2]])
    return tuple(value if result.is_tensor else next(lengths) for value, result in zip(values, results, strict=True))


def _seeded(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """:func:`_locally`; with dropout the kernels draw from the default generator, so it is seeded for this draw."""
    query = args[local.call.signature.index("query") or 0]
    draw = None if local.without_data(query) or not local.arg("dropout_p") else local.draw()
    with nullcontext() if draw is None else draw.seeding(query.device):
        return _locally(local, *args, **kwargs)


def _blank(local: LocalCall, query: torch.Tensor) -> Iterator[torch.Tensor | None]:
    for spec in local.outputs:
        yield None if spec is None else query.new_zeros(local.local_shape(spec), dtype=spec.dtype)


def _local_lengths(local: LocalCall) -> Mapping[str, Any]:
    """The number of query positions on this rank, if the op has an argument for it."""
    query = local.spec("query")
    return {"max_q": local.local_shape(query)[-2]} if "max_q" in local.call.args else {}


def _results(call: Call, device_type: str) -> list[TensorMeta | None]:  # one op is the CPU's
    """The CPU's kernel sums in the dtype of the query, or in float32; torch 2.11 says float32 for every query."""
    result, *rest = call.outputs
    if call.op is not aten._scaled_dot_product_flash_attention_for_cpu.default or rest[0] is None:
        return [result, *rest]
    wide = call.args["query"].dtype is torch.float64
    return [result, evolve(rest[0], dtype=torch.float64 if wide else torch.float32)]


# -- rules -------------------------------------------------------------------------------------------------------

# Linear in the values, and the gradients in the incoming one; the weights do not depend on the values.
_LINEAR = linear("value", results=[0])
_LINEAR_BACKWARD = linear("grad_out|grad_out_")


@rule_from(
    [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ],
    static=("dropout_p",),
    lowering=_seeded,
    results=_results,
    work=work.attention,
)
def ATTENTION(call: Call) -> Callable[[Call], Rows]:
    """Named dims b h q e, b h s e, b h s v -> b h q v, b h q; s is whole, q too when causal."""
    return _rows(_flow(call, _RESULTS, reduce="R", facts=_LINEAR))


@rule_from(
    aten._scaled_dot_product_attention_math.default, static=("dropout_p",), lowering=_seeded, work=work.attention
)
def MATH(call: Call) -> Callable[[Call], Rows]:
    """Named dims ... h q e, ... h s e, ... h s v -> ... h q v, ... h q s; s is whole, q too when causal."""
    return _rows(_flow(call, _RESULTS_OF_MATH, reduce="R", facts=_LINEAR))


@rule_from(
    [
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    ],
    static=("dropout_p",),
    lowering=_locally,
    local_args=_local_lengths,
    work=work.attention_backward,
)
def ATTENTION_BACKWARD(call: Call) -> Callable[[Call], Rows]:
    """As forward; gradients of what every shard used whole (keys and values of a sharded q) are partial sums."""
    return _rows(_flow(call, _GRADIENTS, reduce="sum", facts=_LINEAR_BACKWARD))


@rule_from(math_attention.FORWARD, lowering=_locally, work=work.attention)
def MATH_AS_ONE(call: Call) -> Callable[[Call], Rows]:
    """As the math form of torch: named dims ... h q e, ... h s e, ... h s v -> ... h q v, ... h q s."""
    return _rows(_flow(call, _RESULTS_OF_MATH, reduce="R", facts=_LINEAR))


@rule_from(math_attention.BACKWARD, lowering=_locally, work=work.attention_backward)
def MATH_BACKWARD(call: Call) -> Callable[[Call], Rows]:
    """As forward; gradients of keys and values of a sharded q are partial sums."""
    return _rows(_flow(call, _GRADIENTS_OF_MATH, reduce="sum", facts=_LINEAR_BACKWARD))


RULES = (ATTENTION, MATH, MATH_AS_ONE, ATTENTION_BACKWARD, MATH_BACKWARD)
