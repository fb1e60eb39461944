"""Batch norm. Channels are independent of each other; over a sharded batch the statistics are those of all shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from shardwise.rule import REPLICATE, Call, Flow, Row, Rows, TensorMeta, in_memory_format, rule_from, shard
from shardwise_norm.statistics import (
    GRADIENTS,
    RUNNING,
    is_training,
    normalised,
    returns_running,
    synchronised_backward,
)

__all__ = ["RULES", "backward_rows", "forward_rows"]

aten = torch.ops.aten

PARAMETERS = ("weight", "bias", *RUNNING)
PER_CHANNEL = frozenset(PARAMETERS)
SAVED = frozenset({"save_mean", "save_invstd", "save_var"})


def _labels(call: Call) -> tuple[str, ...]:
    """Batch, channel, positions."""
    return tuple("c" if d == 1 else f"b{d}" for d in range(call.args["input"].ndim))


def _pooled(call: Call) -> list[str]:
    """The dims that the statistics reduce."""
    return [label for label in _labels(call) if label != "c"]


# -- what CPU kernels return -------------------------------------------------------------------------------------


def _results(call: Call, device_type: str) -> list[TensorMeta | None]:
    """On the CPU nothing is saved without training, and what is saved is in the parameters' dtype. New running
    statistics have that of the old ones. The result is row-major or channels last.
    """
    result, *saved = in_memory_format(call, device_type)
    if device_type != "cpu":
        return [result, *saved]
    parameters = (call.args.get(name) for name in PARAMETERS)
    dtype = next((p for p in parameters if p is not None), call.args["input"]).dtype
    size = call.args["input"].shape[1] if is_training(call) else 0
    two = [None if s is None else TensorMeta.contiguous((size,), dtype) for s in saved[:2]]
    running = [s for name in RUNNING if (s := call.args.get(name)) is not None] if returns_running(call) else []
    back = [TensorMeta.contiguous(tuple(s.shape), s.dtype) for s in running]
    return [result, *two, *saved[2 : len(saved) - len(back)], *back]


def _gradients(call: Call, device_type: str) -> list[TensorMeta | None]:
    """On the CPU, the mask also applies to the gradient of the input."""
    by_input, *others = in_memory_format(call, device_type, call.args["input"])
    has_first = device_type != "cpu" or call.args["output_mask"][0]
    return [by_input if has_first else None, *others]


# -- rows --------------------------------------------------------------------------------------------------------


def forward_rows(call: Call, *, writes: bool) -> Rows:
    """Rows of a forward that writes its running statistics, or only reads them: channels, batch and positions.

    It is long for two reasons. The kernels refuse an empty shard, so a row is there twice: as it is where no shard is
    empty, and through the lowering otherwise. And statistics that are written stay where they are, so each lowered row
    also stands for every other placement of them, which no notation can say.
    """
    labels, training = _labels(call), is_training(call)
    inputs = [labels if name == "input" else ("c",) for name in call.operand_names]
    # Without training kernels of the CPU save nothing: those results are empty.
    first = call.outputs[1]
    saved = ("c",) if training or (first is not None and first.shape != (0,)) else None
    back = [("c",)] * 2 if returns_running(call) else []
    rest = [None] * (len(call.outputs) - 3 - len(back))
    flow = Flow(
        inputs,
        [labels, saved, saved, *rest, *back],
        reduce=dict.fromkeys((*_pooled(call), "c"), "R"),
        lowered=_pooled(call) if training else (),
        nonempty=labels,
    )
    rows = [row for plain in flow.bind(call).rows for row in _with_empty(plain)]
    return Rows((*rows[:-1], *(_stats_apart(call, rows) if writes else ()), rows[-1]))


def _with_empty(row: Row) -> Iterator[Row]:
    """A row as it is where no shard is empty, and through the lowering otherwise."""
    if not row.lowered:
        yield row
    if row.nonempty:
        yield evolve(row, lowered=True, nonempty=())


def _stats_apart(call: Call, rows: Sequence[Row]) -> Iterator[Row]:
    """The lowered rows with running statistics in other placements: written in place, they stay where they lie."""
    there = [i for i, n in enumerate(call.operand_names) if n in RUNNING and call.operands[i] is not None]
    sharded = [(i,) for i in there] + [tuple(there)] if there else []
    for row in rows:
        if not row.lowered:
            continue
        for which in ((), *sharded):
            inputs = list(row.inputs)
            for i in there:
                inputs[i] = shard(0) if i in which else REPLICATE
            if tuple(inputs) != row.inputs:
                yield evolve(row, inputs=tuple(inputs), name=f"{row.name}, statistics apart")


def backward_rows(call: Call) -> Flow:
    """Channels, batch and positions; linear in the gradient.

    It is long because the ops call their operands by different names. Statistics are saved in training, and on a card
    without it, too: there the kernel reads them.
    """
    labels, training = _labels(call), is_training(call)
    kept = [call.args.get(name) for name in SAVED]
    saved = ("c",) if training or any(s is not None and s.shape != (0,) for s in kept) else None
    dims: dict[str, Any] = {"input": labels, **dict.fromkeys(GRADIENTS, labels), **dict.fromkeys(SAVED, saved)}
    dims |= dict.fromkeys(PER_CHANNEL, ("c",))
    pooled = _pooled(call)
    return Flow(
        [dims.get(name) for name in call.operand_names],
        [labels, ("c",), ("c",)],
        reduce=dict.fromkeys(pooled, "R" if training else "sum"),
        linear="grad_out|grad_output",
        lowered=pooled if training else (),
        nonempty={"c"} if training else labels,
    )


# -- rules -------------------------------------------------------------------------------------------------------


def _forward(call: Call) -> Rows:
    """Channels; batch and positions, in training by the statistics of all shards."""
    return forward_rows(call, writes=True)


def _pure(call: Call) -> Rows:
    """Channels; batch and positions, in training by the statistics of all shards."""
    return forward_rows(call, writes=False)


FORWARD = rule_from(
    [
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._batch_norm_with_update.default,
    ],
    lowering=normalised,
    writes=RUNNING,
    results=_results,
)(_forward)
# Their running statistics are read only.
PURE = rule_from(
    [
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
        aten._batch_norm_no_update.default,
    ],
    lowering=normalised,
    results=_results,
)(_pure)


@rule_from(
    [aten.native_batch_norm_backward.default, aten.batch_norm_backward.default],
    lowering=synchronised_backward,
    results=_gradients,
)
def backward(call: Call) -> Flow:
    """Channels; batch and positions, in training by sums over all shards."""
    return backward_rows(call)


RULES = (FORWARD, PURE, backward)
