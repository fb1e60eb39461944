"""Ops on each plane (line, volume) by itself: pooling, interpolation, padding. Batch and channels may be sharded.

The positions of a pool with fixed windows may be sharded too, by halo exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.rule import (
    Call,
    Facts,
    Flow,
    LocalCall,
    Lowering,
    Op,
    Row,
    Rows,
    Rule,
    TensorMeta,
    in_memory_format,
    labels,
    linear,
    moves,
    rule_from,
    shard,
)
from shardwise_conv.spatial_pool import average, average_backward, largest, largest_backward

__all__ = ["RULES"]

aten = torch.ops.aten

Results = Callable[[Call, str], Sequence[TensorMeta | None]]

PICKING = moves("self")
UNARY = linear("self|grad_output")  # a rule may be for an interpolation and its backward
BY_GRADIENT = linear("grad_output")

# Torch has no working meta kernel for these.
UNPLANNED = {("_adaptive_avg_pool3d_backward", "out")}


def _overloads(names: str) -> Iterator[Op]:
    """Of each op, the overload that returns new tensors and the one that fills ``out=`` tensors."""
    for name in names.split():
        packet = getattr(aten, name)
        tags = ("default", "out", "grad_input")
        yield from (getattr(packet, tag) for tag in tags if tag in packet.overloads() and (name, tag) not in UNPLANNED)


def _sizes(local: LocalCall) -> Mapping[str, Any]:
    """The ``input_size`` of an interpolation's backward, for this rank's shard."""
    if "input_size" not in local.call.args:
        return {}
    result = local.outputs[0]
    assert result is not None
    return {"input_size": local.local_shape(result)}


def planes(
    names: str,
    positions: int,
    facts: Facts | None = None,
    by_position: Lowering | None = None,
    *,
    filled: bool = False,
    results: Results | None = None,
) -> Rule:
    """A rule for ops on tensors whose last ``positions`` dims are whole and whose other dims pass through.

    With the lowering ``by_position``, the last dims may be sharded too, in every operand and result. These rows are
    written out, since a position has another size in each operand. ``filled`` says that CUDA's kernels take no empty
    batch.
    """

    def describe(call: Call) -> Rows:
        x = call.operands[0]
        assert x is not None
        lead = x.ndim - positions
        names = labels(x.ndim, whole=range(lead, x.ndim))
        # Bytes round when they are interpolated or averaged.
        exact = [facts] if facts and (x.dtype.is_floating_point or facts == PICKING) else []
        # The kernels accept an empty batch, but not planes without channels.
        nonempty = names[:lead] if filled else names[lead - 1 : lead]
        flow = Flow([names], [names], partial=exact, nonempty=[d for d in nonempty if d])
        rows = flow.bind(call).rows
        if by_position is None or not x.dtype.is_floating_point:
            return Rows(rows)
        whole = rows[-1]
        by_dim = []
        for d in range(lead, x.ndim):
            inputs, outputs = (tuple(p and shard(d) for p in side) for side in (whole.inputs, whole.outputs))
            by_dim.append(Row(inputs, outputs, f"shard d{d}", lowered=True))
        return Rows((*rows[:-1], *by_dim, rows[-1]))

    how = "positions by halo exchange" if by_position else "positions are whole"
    describe.__doc__ = f"Batch and channels; {how}" + (f"; {facts}." if facts else ".")
    return rule_from(_overloads(names), local_args=_sizes, lowering=by_position, results=results)(describe)


def _each(names: str, facts: Facts | None = None, *, results: Results | None = None) -> list[Rule]:
    """Rules for ops in one, two and three dims; ``#`` in a name stands for their number."""
    rules = []
    for dims in (1, 2, 3):
        existing = " ".join(
            name for text in names.split() if hasattr(aten, name := text.replace("#", str(dims))) or "#" not in text
        )
        if existing:
            rules.append(planes(existing, dims, facts, results=results))
    return rules


MAX_POOLS = [planes(f"max_pool{n}d_with_indices", n, None, largest) for n in (2, 3)]
MAX_POOL_BACKWARDS = [planes(f"max_pool{n}d_with_indices_backward", n, BY_GRADIENT, largest_backward) for n in (2, 3)]
AVERAGE_POOLS = [planes(f"avg_pool{n}d", n, UNARY, average) for n in (2, 3)]
AVERAGE_POOL_BACKWARDS = [planes(f"avg_pool{n}d_backward", n, BY_GRADIENT, average_backward) for n in (2, 3)]
ADAPTIVE_POOLS = [
    planes("adaptive_max_pool2d", 2),
    planes("adaptive_max_pool3d", 3),
    planes("adaptive_max_pool2d_backward", 2, BY_GRADIENT),
    planes("adaptive_max_pool3d_backward", 3, BY_GRADIENT),
    planes("_adaptive_avg_pool2d", 2, UNARY),
    planes("_adaptive_avg_pool3d", 3, UNARY),
    planes("_adaptive_avg_pool2d_backward", 2, BY_GRADIENT),
    planes("_adaptive_avg_pool3d_backward", 3, BY_GRADIENT),
]
NEAREST = _each("upsample_nearest#d _upsample_nearest_exact#d", PICKING)
NEAREST_BACKWARDS = _each("upsample_nearest#d_backward _upsample_nearest_exact#d_backward", UNARY)
# Torch has it since 2.13.
LANCZOS = "_upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward"
SMOOTH = [
    planes("upsample_linear1d upsample_linear1d_backward", 1, UNARY),
    planes(
        "upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward",
        2,
        UNARY,
    ),
    planes(
        "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward "
        "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward",
        2,
        UNARY,
        filled=True,
    ),
    *([planes(LANCZOS, 2, UNARY, filled=True)] if hasattr(aten, "_upsample_lanczos2d_aa") else []),
    planes("upsample_trilinear3d upsample_trilinear3d_backward", 3, UNARY),
]


def _as_padded(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """Gradients in the memory format of what was padded."""
    return in_memory_format(call, device_type, call.args["self"])


PADDINGS = _each("reflection_pad#d replication_pad#d", PICKING, results=in_memory_format)
PADDING_BACKWARDS = _each("reflection_pad#d_backward replication_pad#d_backward", BY_GRADIENT, results=_as_padded)

RULES = (
    *MAX_POOLS,
    *MAX_POOL_BACKWARDS,
    *AVERAGE_POOLS,
    *AVERAGE_POOL_BACKWARDS,
    *ADAPTIVE_POOLS,
    *NEAREST,
    *NEAREST_BACKWARDS,
    *SMOOTH,
    *PADDINGS,
    *PADDING_BACKWARDS,
)
