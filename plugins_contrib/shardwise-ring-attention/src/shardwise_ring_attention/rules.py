"""Rules for scaled dot product attention whose sequence may be sharded, forward and backward.

They replace the rules that come with shardwise, so they have those rows too: batch, heads (grouped queries with their
key heads), and query positions with whole keys. New are the ring, for queries, keys and values that are sharded the
same way, and sharded keys with whole queries. The new rows allow a causal mask only, and no dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from shardwise.rule import (
    REPLICATE,
    Call,
    Facts,
    Flow,
    LocalCall,
    Placement,
    Row,
    Rows,
    TensorMeta,
    linear,
    partial,
    rule_from,
    shard,
)
from shardwise_ring_attention.place import SEQUENCE
from shardwise_ring_attention.ring import ring_backward, ring_forward
from shardwise_ring_attention.weightless import MARKS

__all__ = ["RULES"]

aten = torch.ops.aten

_Label = str | tuple[tuple[str, int], ...] | None
_Labels = list[_Label] | None

# What the dims of a tensor are, by argument: query heads H, key heads K, query positions Q, the rest whole.
_QUERY, _KEY, _STATISTIC = "b H Q E", "b K S E", "b H Q"
_ARGUMENTS = {
    "query": _QUERY,
    "key": _KEY,
    "value": _KEY,
    "attn_mask": "b H Q S",
    "grad_out": _QUERY,
    "out": _QUERY,
    "logsumexp": _STATISTIC,
}
_RESULTS = (_QUERY, _STATISTIC)  # and tensors that do not depend on the shard: seeds, debugging
_GRADIENTS = (_QUERY, _KEY, _KEY)


# -- rows --------------------------------------------------------------------------------------------------------


def _heads(query: TensorMeta, key: TensorMeta) -> tuple[_Label, _Label]:
    """Labels of query heads and key heads."""
    many, few = query.shape[1], key.shape[1]
    if many == few:
        return "h", "h"
    if few == 1:
        return "h", None
    if few == 0 or many % few:
        return None, None
    return (("h", few), ("r", many // few)), "h"


def _named(meta: TensorMeta | None, dims: str | None, labels: Mapping[str, _Label]) -> _Labels:
    if meta is None or dims is None:
        return None
    words = dims.split()[-meta.ndim :]
    # A size-1 dim of a mask is broadcast.
    absent = 1 if dims == _ARGUMENTS["attn_mask"] else None
    return [None if n == absent else labels[word] for word, n in zip(words, meta.shape, strict=True)]


def _may_ring(call: Call) -> bool:
    """Whether scores may be computed block by block: a mask or random numbers belong to the whole scores."""
    plain = call.args.get("attn_mask") is None and not call.args.get("return_debug_mask")
    return plain and not call.args["dropout_p"]


def _flow(call: Call, described: Sequence[str], reduce: str, facts: Facts) -> Flow:
    """The flow of one call; ``reduce`` names the reduction of a result that lacks a sharded dim.

    It is long because it serves ops that order and name their operands differently (``_ARGUMENTS`` has their dims).
    """
    many, few = _heads(call.args["query"], call.args["key"])
    positions = None if call.args["is_causal"] and not _may_ring(call) else "q"
    labels = {"b": "b", "H": many, "K": few, "Q": positions, "S": None, "E": None}
    inputs = [
        _named(meta, _ARGUMENTS.get(name), labels) for meta, name in zip(call.operands, call.operand_names, strict=True)
    ]
    results = [*described, *[None] * (len(call.outputs) - len(described))]
    outputs = [_named(meta, dims, labels) for meta, dims in zip(call.outputs, results, strict=True)]
    names = {"b", "h", "q"}
    random = bool(call.args["dropout_p"])
    return Flow(
        inputs,
        outputs,
        reduce=dict.fromkeys(names, reduce),
        replicate=names | {"r"} if random else {"r"},
        partial=() if random else [facts],
        nonempty=names,
    )


def _rows(call: Call, flow: Flow, ring: Mapping[str, Sequence[Placement]]) -> Rows:
    """Rows of the flow, then those of the ring.

    The kernels refuse an empty shard, so each row of the flow is there twice: plain if no shard is empty, else lowered.
    """
    rows = [variant for row in flow.bind(call).rows for variant in _variants(call, row)]
    if _may_ring(call):
        rows += [_ring_row(call, name, outputs) for name, outputs in ring.items()]
    return Rows(tuple(rows))


def _variants(call: Call, row: Row) -> Iterator[Row]:
    has_lengths = any(not result.is_tensor for result in call.signature.results)
    # A mask counts positions from the start, and an op that returns lengths must return those of the whole.
    needs_lowering = row.name == "shard q" and (call.args["is_causal"] or has_lengths)
    if not needs_lowering:
        yield row
    if row.nonempty:
        yield evolve(row, nonempty=(), lowered=True)


def _ring_row(call: Call, name: str, outputs: Sequence[Placement]) -> Row:
    split = {_KEY} if name == _KEYS_ALONE else {_QUERY, _KEY, _STATISTIC}
    inputs = [
        None if meta is None else shard(SEQUENCE) if _ARGUMENTS.get(argument) in split else REPLICATE
        for meta, argument in zip(call.operands, call.operand_names, strict=True)
    ]
    rest = [REPLICATE] * (len(call.outputs) - len(outputs))
    return Row(tuple(inputs), (*outputs, *rest), name, lowered=True)


# -- lowerings ---------------------------------------------------------------------------------------------------


def _forward(local: LocalCall, *args: Any, **named: Any) -> tuple[Any, ...]:
    """The ring where positions are sharded, the op itself elsewhere."""
    query, key, value, _, _, *debug = args
    if not _rings(local):
        return _plain(local, query, *args, **named)

    marks = MARKS[local.call.op]

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = local.call.op(q, k, v, 0.0, causal, *debug, **named)
        return marks.read(out, lse, q, k, causal)

    out, lse = ring_forward(local, kernel, query, key, value)
    return _results(local, (out, marks.write(lse)))


def _backward(local: LocalCall, *args: Any, **named: Any) -> tuple[Any, ...]:
    """As forward."""
    tensors, rest = args[:6], args[6:]
    if not _rings(local):
        return _plain(local, tensors[1], *args, **named)

    def kernel(g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool) -> Any:
        scalars = _scalars(rest, q.shape[SEQUENCE], k.shape[SEQUENCE], causal)
        return local.call.op(g, q, k, v, o, lse, *scalars, **named)

    return _results(local, ring_backward(local, kernel, tensors))


def _scalars(rest: Sequence[Any], queries: int, keys: int, causal: bool) -> tuple[Any, ...]:
    """What a backward op takes behind its tensors, for one block."""
    if len(rest) == 2:  # noqa: PLR2004  the CPU's: dropout, is causal
        return 0.0, causal
    starts_q, starts_k, _, _, _, _, seed, offset = rest
    return starts_q, starts_k, queries, keys, 0.0, causal, seed, offset


def _rings(local: LocalCall) -> bool:
    """Whether positions are sharded and the ring may compute them; under a mask or dropout it may not."""
    sharded = local.sharding(local.spec("query"), SEQUENCE) or local.sharding(local.spec("key"), SEQUENCE)
    return bool(sharded) and _may_ring(local.call)


def _plain(local: LocalCall, query: Tensor, *args: Any, **named: Any) -> tuple[Any, ...]:
    """The local op if this rank has queries, else results without elements (or of zeros)."""
    if query.numel():
        results: tuple[Any, ...] = local.call.op(*args, **named)
        return results
    return _results(local, ())


def _results(local: LocalCall, computed: Sequence[Tensor]) -> tuple[Any, ...]:
    """All results of the op, from the first few. Without dropout nobody reads the others; lengths are of the whole."""
    tensors = iter(range(len(local.outputs)))
    lengths = iter([local.arg("query").shape[SEQUENCE], local.arg("key").shape[SEQUENCE]])
    return tuple(
        _in_memory_order(local, next(tensors), computed) if result.is_tensor else next(lengths)
        for result in local.call.signature.results
    )


def _in_memory_order(local: LocalCall, i: int, computed: Sequence[Tensor]) -> Tensor | None:
    """A result with its dims in the memory order of the whole one; zeros for a result that was not computed."""
    spec = local.outputs[i]
    if spec is None:
        return None
    shape = local.local_shape(spec)
    if i >= len(computed):
        return torch.zeros(shape, dtype=spec.dtype, device=spec.mesh.device_type)
    order = sorted(range(spec.ndim), key=lambda d: -spec.stride[d])
    result = torch.empty_permuted(shape, order, dtype=spec.dtype, device=computed[i].device)
    return result.copy_(computed[i])


def _local_lengths(local: LocalCall) -> Mapping[str, Any]:
    """The numbers of positions on this rank, if the op takes them."""
    operand_of = {"max_q": "query", "max_k": "key"}
    known = {name: of for name, of in operand_of.items() if name in local.call.args}
    return {name: local.local_shape(local.spec(of))[SEQUENCE] for name, of in known.items()}


# -- rules -------------------------------------------------------------------------------------------------------

_RING, _KEYS_ALONE = "ring of q s", "shard s"
_SPLIT, _SUM = shard(SEQUENCE), partial("sum")
# Linear in the values, and the gradients in the incoming one; the weights do not depend on the values.
_FORWARD_ROWS = {_RING: (_SPLIT, _SPLIT), _KEYS_ALONE: (REPLICATE, REPLICATE)}
_BACKWARD_ROWS = {_RING: (_SPLIT, _SPLIT, _SPLIT), _KEYS_ALONE: (_SUM, _SPLIT, _SPLIT)}


@rule_from(
    [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
    ],
    static=("dropout_p",),
    lowering=_forward,
)
def ATTENTION(call: Call) -> Rows:
    """Named dims b h q e, b h s e, b h s v -> b h q v, b h q; a ring over q with s (no mask, no dropout)."""
    return _rows(call, _flow(call, _RESULTS, "R", linear("value", results=[0])), _FORWARD_ROWS)


@rule_from(
    [
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
    ],
    static=("dropout_p",),
    lowering=_backward,
    local_args=_local_lengths,
)
def ATTENTION_BACKWARD(call: Call) -> Rows:
    """As forward; gradients of what every shard used whole are partial sums."""
    return _rows(call, _flow(call, _GRADIENTS, "sum", linear("grad_out")), _BACKWARD_ROWS)


RULES = (ATTENTION, ATTENTION_BACKWARD)
