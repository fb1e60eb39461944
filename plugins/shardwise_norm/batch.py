"""Batch norm. Channels are independent of each other; statistics over a sharded batch are taken over all shards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, rule_from
from shardwise.spec import TensorMeta

__all__ = [
    "RULES",
    "backward_flow",
    "forward_flow",
    "pooling",
    "reserve",
    "synchronised",
    "synchronised_backward",
]

aten = torch.ops.aten

# The backward is linear in the gradient of the output.
LINEAR: tuple[str, ...] = ("sum, R, ... -> sum, ...", "avg, R, ... -> avg, ...")
PER_CHANNEL = frozenset({"weight", "bias", "running_mean", "running_var"})
SAVED = frozenset({"save_mean", "save_invstd", "save_var"})
GRADIENTS = frozenset({"grad_out", "grad_output"})


def _labels(call: Call) -> tuple[str, ...]:
    """Batch, channel, positions."""
    return tuple("c" if d == 1 else f"b{d}" for d in range(call.args["input"].ndim))


def _pooled(call: Call) -> list[str]:
    """The dims over which statistics are taken."""
    return [label for label in _labels(call) if label != "c"]


def named_arguments(local: LocalCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A lowering's arguments by schema name."""
    signature = local.call.signature
    return dict(zip((a.name for a in signature.args), signature.bind(args, kwargs), strict=True))


def first_of(named: dict[str, Any], *names: str) -> Any:
    """The argument that goes by one of these names, as the ops' schemas do not agree on them."""
    return next(named[name] for name in names if name in named)


# -- statistics over all shards ----------------------------------------------------------------------------------


def _count(local: LocalCall) -> int:
    """Values per channel, over all shards."""
    shape = local.call.args["input"].shape
    count: int = math.prod(shape) // max(1, shape[1])
    return count


def _shape(x: Tensor, per_channel: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))


def _over(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def pooling(local: LocalCall) -> tuple[int, ...]:
    """The mesh dims that split the batch or the positions."""
    spec = local.spec("input")
    return local.sharding(spec, *(d for d in range(spec.ndim) if d != 1))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _saved_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Saved statistics are in the parameters' dtype on the CPU and in the accumulator's elsewhere."""
    return (x if weight is None else weight).dtype if x.device.type == "cpu" else _wide(x)


def synchronised(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Normalise in training mode by the statistics of all shards; every rank updates the running ones alike."""
    named = named_arguments(local, args, kwargs)
    x, weight = named["input"], named["weight"]
    wide, mesh_dims, count = x.to(_wide(x)), pooling(local), _count(local)
    mean = local.comm.all_reduce(wide.sum(_over(x)), "sum", mesh_dims) / count
    centred = wide - _shape(x, mean)
    distance = local.comm.all_reduce(centred.square().sum(_over(x)), "sum", mesh_dims)
    invstd = (distance / count + first_of(named, "eps", "epsilon")).rsqrt()
    _update(named, mean, distance / (count - 1))
    result = centred * _shape(x, invstd)
    if weight is not None:
        result = result * _shape(x, weight)
    if named["bias"] is not None:
        result = result + _shape(x, named["bias"])
    dtype = _saved_dtype(x, weight)
    found = (result.to(x.dtype), mean.to(dtype), invstd.to(dtype))
    return (*found, reserve(x)) if len(local.call.outputs) > len(found) else found


def _update(named: dict[str, Any], mean: Tensor, variance: Tensor) -> None:
    momentum = first_of(named, "momentum", "exponential_average_factor")
    for name, value in (("running_mean", mean), ("running_var", variance)):
        running = named.get(name)
        if running is not None:
            running.copy_(running * (1 - momentum) + value * momentum)


def reserve(x: Tensor) -> Tensor:
    """What a fused kernel would hand to its backward; ours needs nothing."""
    return torch.empty(0, dtype=torch.uint8, device=x.device)


def synchronised_backward(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Gradients in training mode, where every value of a channel takes part in the mean and variance of all shards."""
    named = named_arguments(local, args, kwargs)
    x, weight = named["input"], named["weight"]
    wide = _wide(x)
    gradient = first_of(named, *GRADIENTS).to(wide)
    mean, invstd = named["save_mean"].to(wide), first_of(named, "save_invstd", "save_var").to(wide)
    normal = (x.to(wide) - _shape(x, mean)) * _shape(x, invstd)
    sums = torch.stack([gradient.sum(_over(x)), (gradient * normal).sum(_over(x))])
    by_bias, by_weight = local.comm.all_reduce(sums, "sum", pooling(local))
    scale = invstd if weight is None else invstd * weight.to(wide)
    of_mean = (_shape(x, by_bias) + normal * _shape(x, by_weight)) / _count(local)
    found = (_shape(x, scale) * (gradient - of_mean), by_weight, by_bias)
    mask = named.get("output_mask", (True, True, True))
    dtypes = (x.dtype, *[(x if weight is None else weight).dtype] * 2)
    return tuple(t.to(dtype) if wanted else None for t, wanted, dtype in zip(found, mask, dtypes, strict=True))


# -- what CPU kernels return -------------------------------------------------------------------------------------


def _results(call: Call, device_type: str) -> list[TensorMeta | None]:
    """On the CPU nothing is saved without training, and what is saved is in the parameters' dtype."""
    result, *saved = call.outputs
    if device_type != "cpu":
        return [result, *saved]
    weight = call.args["weight"]
    dtype = (call.args["input"] if weight is None else weight).dtype
    size = call.args["input"].shape[1] if call.args["training"] else 0
    return [result, *(None if s is None else TensorMeta.contiguous((size,), dtype) for s in saved)]


def _gradients(call: Call, device_type: str) -> list[TensorMeta | None]:
    """The CPU heeds the mask for the gradient of the input too."""
    by_input, *others = call.outputs
    wanted = device_type != "cpu" or call.args["output_mask"][0]
    return [by_input if wanted else None, *others]


# -- rules -------------------------------------------------------------------------------------------------------


def forward_flow(call: Call, training: bool) -> Flow:
    """The rows of a forward: channels, batch and positions."""
    # The kernels refuse a tensor without elements; the lowerings take it.
    labels = _labels(call)
    inputs = [labels if name == "input" else ("c",) for name in call.operand_names]
    # Without training nothing is saved: those results are empty.
    saved = ("c",) if training else None
    return Flow(
        inputs,
        [labels, saved, saved, *[None] * (len(call.outputs) - 3)],
        reduce=dict.fromkeys((*_pooled(call), "c"), "R"),
        lowered=_pooled(call) if training else False,
        nonempty={"c"} if training else labels,
    )


def backward_flow(call: Call, training: bool, linear: tuple[str, ...]) -> Flow:
    """The rows of a backward; ``linear`` are those with a pending gradient."""
    labels = _labels(call)
    saved = ("c",) if training else None
    dims: dict[str, Any] = {"input": labels, **dict.fromkeys(GRADIENTS, labels), **dict.fromkeys(SAVED, saved)}
    dims |= dict.fromkeys(PER_CHANNEL, ("c",))
    pooled = _pooled(call)
    return Flow(
        [dims.get(name) for name in call.operand_names],
        [labels, ("c",), ("c",)],
        reduce=dict.fromkeys(pooled, "R" if training else "sum"),
        partial=linear,
        lowered=pooled if training else False,
        nonempty={"c"} if training else labels,
    )


@rule_from(
    [
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
    ],
    lowering=synchronised,
    writes=("running_mean", "running_var"),
    results=_results,
)
def forward(call: Call) -> Flow:
    """Channels; batch and positions, in training by the statistics of all shards."""
    return forward_flow(call, bool(call.args["training"]))


@rule_from(aten.native_batch_norm_backward.default, lowering=synchronised_backward, results=_gradients)
def backward(call: Call) -> Flow:
    """Channels; batch and positions, in training by sums over all shards."""
    return backward_flow(call, bool(call.args["train"]), LINEAR)


RULES = (forward, backward)
