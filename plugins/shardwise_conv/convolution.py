"""Convolution and its backward: by batch, by output channels, by input channels, by groups, and by positions.

A shard of positions needs its neighbours' edges. The lowering fetches them (see ``spatial``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from shardwise.rule import (
    REPLICATE,
    Call,
    Flow,
    LocalCall,
    Row,
    Rows,
    TensorMeta,
    partial,
    rule_from,
    shard,
    strides_of_kernel,
)
from shardwise_conv.spatial import convolve, differentiate

__all__ = ["RULES"]

aten = torch.ops.aten


def _positions(call: Call) -> tuple[str, ...]:
    return tuple(f"p{d}" for d in range(call.args["input"].ndim - 2))


def _rows(rows: Sequence[Row]) -> Rows:
    """The rows by preference: first those that exchange nothing, then those that do, then the whole row."""
    return Rows(tuple(sorted(rows, key=lambda row: (row.name == "R", row.lowered))))


def _dims(call: Call) -> dict[str, tuple[Any, ...]]:
    """Dims of input, weight, bias and result. Within several groups, channels may be sharded by whole groups only."""
    x, weight, groups = call.args["input"], call.args["weight"], call.args["groups"]
    positions = _positions(call)
    kernel_positions = (None,) * (x.ndim - 2)
    transposed = call.args["transposed"]
    into: Any
    out: Any
    if groups == 1:
        into, out = "i", "o"
        kernel: tuple[Any, ...] = (into, out) if transposed else (out, into)
    else:
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        into, out = (("g", groups), ("i", x.shape[1] // groups)), (("g", groups), ("o", channels // groups))
        kernel = (into if transposed else out, None)
    return {
        "input": ("n", into, *positions),
        "weight": (*kernel, *kernel_positions),
        "bias": (out,),
        "result": ("n", out, *positions),
    }


def _local_sizes(local: LocalCall) -> Mapping[str, Any]:
    """The number of groups, and in the backward the size of the bias, of this rank's shards."""
    groups = local.arg("groups")
    if groups > 1:
        groups //= local.spec("input").shards_per_dim[1]
    if "bias_sizes" not in local.call.args:
        return {"groups": groups}
    sizes = local.arg("bias_sizes")
    channels = local.local_shape(local.spec("grad_output"))[1]
    return {"groups": groups, "bias_sizes": sizes and (channels,)}


def _multiply_adds(call: Call, result: TensorMeta | None) -> float:
    """Floating-point operations of the forward pass: each position meets the weights of one channel."""
    weight: TensorMeta = call.args["weight"]
    positions: TensorMeta | None = call.args["input"] if call.args["transposed"] else result
    return 2.0 * (0 if positions is None else positions.numel) * weight.numel / max(weight.shape[0], 1)


def _on_meta(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
    """Torch's meta kernel does not compare the channels of a transposed convolution, and a rank without positions would
    not either.
    """
    bound = dict(zip(("bias", "stride", "padding", "dilation", "transposed"), rest, strict=False))
    transposed = (bound | named)["transposed"]
    sizes: tuple[Any, ...] = (x.shape[1] if x.ndim == weight.ndim else weight.shape[0], weight.shape[0])
    if transposed and not any(isinstance(n, torch.SymInt) for n in sizes) and sizes[0] != sizes[1]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input{list(x.shape)} to have "
            f"{sizes[1]} channels, but got {sizes[0]} channels instead"
        )
    op = aten.convolution.out if "out" in named else aten.convolution.default
    return op(x, weight, *rest, **named)


# Affine in the input and in the weight. A bias that every rank has whole would be added to a partial sum once per rank.
AFFINE = ("sum, R, sum -> sum", "R, sum, sum -> sum", "avg, R, R -> avg", "R, avg, R -> avg")


@rule_from(
    [aten.convolution.default, aten.convolution.out],
    local_args=_local_sizes,
    lowering=convolve,
    meta=_on_meta,
    results=strides_of_kernel,
    work=lambda call: _multiply_adds(call, call.outputs[0]),
)
def convolution(call: Call) -> Rows:
    """Batch, output channels, groups or positions; sharded input channels leave a partial sum, bias included.

    It is long because ``partial`` depends on the number of groups, and ``nonempty`` of one row on one operand only.
    """
    dims = _dims(call)
    contracted = ["i, i, sum -> sum"] if call.args["groups"] == 1 else []
    flow = Flow(
        [dims["input"], dims["weight"], dims["bias"]],
        [dims["result"]],
        partial=[*contracted, *AFFINE],
        lowered=_positions(call),
        nonempty={"o", "g"},
    )
    # Without any input channel the kernel returns a wrong shape.
    rows = flow.bind(call).rows
    return _rows([evolve(r, nonempty=((0, 1),)) if r.name in contracted else r for r in rows])


@rule_from(
    aten.convolution_backward.default,
    local_args=_local_sizes,
    lowering=differentiate,
    results=strides_of_kernel,
    work=lambda call: 2 * _multiply_adds(call, call.args["grad_output"]),
)
def backward(call: Call) -> Rows:
    """A gradient that lacks the sharded dim is a partial sum; that of the bias does not depend on the input.

    It is long because the rows of positions are written out: a position has another size in the gradient than in the
    input, so the two share no named dim.
    """
    dims = _dims(call)
    flow = Flow(
        [dims["result"], dims["input"], dims["weight"]],
        [dims["input"], dims["weight"], dims["bias"]],
        reduce={"n": "sum", "o": "sum", "i": "R"},
        replicate=_positions(call),
        linear="grad_output",
        nonempty={"o", "i", "g"},
    )
    by_position = [
        Row(
            (shard(d), shard(d), REPLICATE),
            (shard(d), partial("sum"), partial("sum")),
            f"shard p{d - 2}",
            lowered=True,
        )
        for d in range(2, call.args["input"].ndim)
    ]
    return _rows([*flow.bind(call).rows, *by_position])


RULES = (convolution, backward)
