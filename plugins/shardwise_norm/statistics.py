"""Batch norm over shards: the statistics of all shards, and running statistics in any placement."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, LocalCall, TensorSpec

__all__ = [
    "GRADIENTS",
    "RUNNING",
    "is_apart",
    "is_training",
    "normalised",
    "pooling",
    "reserve",
    "returns_running",
    "synchronised_backward",
]

GRADIENTS = frozenset({"grad_out", "grad_output"})
RUNNING = ("running_mean", "running_var")
# Result, mean, deviation, reserve.
_WITH_RESERVE = 4


def is_training(call: Call) -> bool:
    """Whether a call normalises by the statistics of its input; its flag says so, or the op's name."""
    for flag in ("training", "train", "update"):
        if flag in call.args:
            return bool(call.args[flag])
    # cudnn has a backward for training only.
    return "with_update" in str(call.op) or "cudnn" in str(call.op)


def returns_running(call: Call) -> bool:
    """Whether a call returns new running statistics instead of writing its operands."""
    return "functional" in str(call.op)


def _named(local: LocalCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A lowering's arguments by schema name."""
    signature = local.call.signature
    return dict(zip((a.name for a in signature.args), signature.bind(args, kwargs), strict=True))


def _first(named: dict[str, Any], *names: str) -> Any:
    """The argument that has one of these names: the ops' schemas call it differently."""
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


def normalised(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Any forward on any shards: in training by the statistics of all shards, which every rank computes."""
    named = _named(local, args, kwargs)
    x, weight, eps = named["input"], named["weight"], _first(named, "eps", "epsilon")
    wide = x.to(_wide(x))
    if is_training(local.call):
        mean, invstd, running = _of_all_shards(local, named, wide, eps)
        saved = [mean, invstd]
    else:
        running = [named[name] for name in RUNNING]
        mean, variance = (_read(local, name, named[name]).to(wide.dtype) for name in RUNNING)
        invstd = (variance + eps).rsqrt()
        first = local.outputs[1]
        saved = [mean[:0], invstd[:0]] if first is None or first.shape == (0,) else [mean, invstd]
    result = (wide - _shape(x, mean)) * _shape(x, invstd)
    if weight is not None:
        result = result * _shape(x, weight)
    if named["bias"] is not None:
        result = result + _shape(x, named["bias"])
    return _results(local, x, [result, *saved], running)


def _results(local: LocalCall, x: Tensor, values: list[Tensor], running: list[Tensor | None]) -> tuple[Tensor, ...]:
    """What the op returns: the result, the saved statistics and, if its schema has them, a reserve and running ones."""
    specs = local.outputs
    if len(specs) in (_WITH_RESERVE, _WITH_RESERVE + len(RUNNING)):
        values.append(reserve(x))
    if returns_running(local.call):
        values += [torch.clone(statistic) for statistic in running if statistic is not None]
    return tuple(value if spec is None else value.to(spec.dtype) for value, spec in zip(values, specs, strict=True))


def _of_all_shards(
    local: LocalCall, named: dict[str, Any], wide: Tensor, eps: float
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Mean and inverse deviation of each channel over all shards, and the running statistics after this batch."""
    mesh_dims, count = pooling(local), _count(local)
    mean = _total(local, wide.sum(_over(wide)), mesh_dims) / count
    distance = _total(local, (wide - _shape(wide, mean)).square().sum(_over(wide)), mesh_dims)
    running = _updated(local, named, mean, distance / (count - 1))
    return mean, (distance / count + eps).rsqrt(), running


def _updated(local: LocalCall, named: dict[str, Any], *statistics: Tensor) -> list[Tensor | None]:
    """The running statistics, moved towards those of the batch; in place unless the op returns new ones."""
    momentum = _first(named, "momentum", "exponential_average_factor")
    statistics_after: list[Tensor | None] = []
    for name, value in zip(RUNNING, statistics, strict=True):
        running = named.get(name)
        if running is not None:
            moved = running * (1 - momentum) + _written(local, name, value) * momentum
            running = moved.to(running.dtype) if returns_running(local.call) else running.copy_(moved)
        statistics_after.append(running)
    return statistics_after


def _total(local: LocalCall, mine: Tensor, mesh_dims: tuple[int, ...]) -> Tensor:
    return local.comm.all_reduce(mine, "sum", mesh_dims) if mesh_dims else mine


def _apart(local: LocalCall, name: str) -> bool:
    """Whether running statistics lie otherwise than the channels of the input do."""
    return local.sharding(local.spec(name)) != local.sharding(local.spec("input"), 1)


def is_apart(local: LocalCall) -> bool:
    """Whether any running statistics lie otherwise than the channels of the input do."""
    return any(local.call.args.get(name) is not None and _apart(local, name) for name in RUNNING)


def _relaid(local: LocalCall, value: Tensor, spec: TensorSpec, dim: int, run: tuple[int, int]) -> Tensor:
    """A value per channel of the shards of dim ``dim`` of ``spec``, as ``run[1]`` channels from ``run[0]`` on.

    Every rank knows the sizes of all shards, so equal shapes are sent, and compiled code can do it, too.
    """
    wholes = []
    whole = spec.shape[dim]
    for mesh_dim in local.sharding(spec, dim):
        step = -(-whole // spec.mesh_shape[mesh_dim])
        wholes.append((mesh_dim, whole, step))
        whole = max(0, min(step, whole - local.coordinate[mesh_dim] * step))
    # The last mesh dim splits innermost.
    for mesh_dim, whole, step in reversed(wholes):
        padded = torch.nn.functional.pad(value, (0, step - value.shape[0]))
        pieces = local.comm.all_gather(padded, mesh_dim, same_shape=True)
        value = torch.cat(pieces)[:whole]
    return value.narrow(0, *run)


def _written(local: LocalCall, name: str, value: Tensor) -> Tensor:
    """Values for the channels of the input's shard, as values for those of the running statistics' shard."""
    if not _apart(local, name):
        return value
    spec = local.spec(name)
    run = (local.offset(spec)[0], local.local_shape(spec)[0])
    return _relaid(local, value, local.spec("input"), 1, run)


def _read(local: LocalCall, name: str, running: Tensor) -> Tensor:
    """Running statistics for the channels of the input's shard."""
    if not _apart(local, name):
        return running
    spec = local.spec("input")
    run = (local.offset(spec)[1], local.local_shape(spec)[1])
    return _relaid(local, running, local.spec(name), 0, run)


def reserve(x: Tensor) -> Tensor:
    """An empty tensor in place of what a fused kernel passes to its backward; ours needs nothing."""
    return torch.empty(0, dtype=torch.uint8, device=x.device)


def synchronised_backward(local: LocalCall, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Gradients in training mode, where every value of a channel takes part in the mean and variance of all shards."""
    named = _named(local, args, kwargs)
    x, weight = named["input"], named["weight"]
    wide = _wide(x)
    gradient = _first(named, *GRADIENTS).to(wide)
    mean, invstd = named["save_mean"].to(wide), _first(named, "save_invstd", "save_var").to(wide)
    centred = x.to(wide) - _shape(x, mean)
    sums = torch.stack([gradient.sum(_over(x)), (gradient * centred).sum(_over(x))])
    by_bias, product = _total(local, sums, pooling(local))
    # In the order of torch's kernel, so that infinities meet the same numbers.
    slope = product * invstd * invstd / _count(local)
    of_mean = _shape(x, by_bias / _count(local))
    by_input = (gradient - of_mean - centred * _shape(x, slope)) * _shape(x, invstd)
    if weight is not None:
        by_input = by_input * _shape(x, weight.to(wide))
    gradients = (by_input, product * invstd, by_bias)
    mask = named.get("output_mask", (True, True, True))
    dtypes = (x.dtype, *[(x if weight is None else weight).dtype] * 2)
    return tuple(t.to(dtype) if needed else None for t, needed, dtype in zip(gradients, mask, dtypes, strict=True))
