"""Vector norms and logsumexp; over a sharded dim a lowering joins the values of all shards."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.rule import Call, Flow, LocalCall, rule_from
from shardwise_reduce.dims import accumulator, into, ops, reduced_dims, reduction, split_mesh_dims

__all__ = ["RULES"]


def joined_norm(local: LocalCall, x: torch.Tensor, p: float, dims: tuple[int, ...]) -> torch.Tensor:
    """The ``p``-norm over ``dims`` of all shards; an empty shard adds nothing, whatever ``p`` is."""
    mesh_dims, size = local.once(split_mesh_dims), x.abs()
    if math.isinf(p):
        kind, neutral = ("max", 0.0) if p > 0 else ("min", math.inf)
        # amax refuses an empty shard; one more element with the neutral value changes nothing.
        flat = size.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)) if dims else size[..., None]
        padded = torch.nn.functional.pad(flat, (0, 1), value=neutral)
        return local.comm.all_reduce(padded.amax(-1) if p > 0 else padded.amin(-1), kind, mesh_dims)
    if p == 0:
        return local.comm.all_reduce((size != 0).sum(dims).to(size.dtype), "sum", mesh_dims)
    return local.comm.all_reduce(size.pow(p).sum(dims), "sum", mesh_dims).pow(1 / p)


def _norm(local: LocalCall, x: torch.Tensor, p: float | None = 2, *_: Any, out: Any = None, **__: Any) -> torch.Tensor:
    result = local.outputs[0]
    assert result is not None
    wide = accumulator(result.dtype)
    cast = x.to(wide.to_complex() if x.is_complex() else wide)
    return into(local, joined_norm(local, cast, 2.0 if p is None else float(p), reduced_dims(local.call)), out)


def _on_meta(
    x: torch.Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> torch.Tensor:
    """The norm on the meta device, where torch takes any negative dim of a tensor without elements for an empty one."""
    dims = [d + x.ndim if -x.ndim <= d < 0 else d for d in dim or ()]
    result: torch.Tensor = torch.linalg.vector_norm(
        x, 2 if p is None else p, dims or None, keepdim, dtype=dtype, out=out
    )
    return result


@rule_from(
    ops(
        "linalg_vector_norm.default linalg_vector_norm.out norm.Scalar norm.Scalar_out norm.ScalarOpt_dim norm.out "
        "norm.ScalarOpt_dim_dtype norm.dtype_out norm.ScalarOpt_dtype norm.ScalarOpt_dtype_out"
    ),
    lowering=_norm,
    meta=_on_meta,
)
def norm(call: Call) -> Flow:
    """Any dim; over a reduced one the powers of all shards add up, then the root follows."""
    return reduction(call, "R", lowered=True)


def _logsumexp(local: LocalCall, x: torch.Tensor, *_: Any, out: Any = None) -> torch.Tensor:
    result = local.outputs[0]
    assert result is not None
    dims, mesh_dims = reduced_dims(local.call), local.once(split_mesh_dims)
    cast = x.to(accumulator(result.dtype))
    flat = cast.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    # Of complex numbers, the highest real part, as torch has it: it decides the branch of the logarithm.
    real = flat.real if flat.is_complex() else flat
    highest = torch.nn.functional.pad(real, (0, 1), value=-math.inf).amax(-1, keepdim=True)
    highest = local.comm.all_reduce(highest, "max", mesh_dims)
    # Where the highest is infinite, subtracting it would make NaN of inf - inf.
    shift = highest.masked_fill(highest.isinf(), 0)
    total = local.comm.all_reduce((flat - shift).exp().sum(-1, keepdim=True), "sum", mesh_dims)
    return into(local, total.log() + shift, out)


@rule_from(ops("logsumexp.default logsumexp.out"), lowering=_logsumexp)
def logsumexp(call: Call) -> Flow:
    """Any dim; over a reduced one the shards exchange their highest values, then their sums."""
    return reduction(call, "R", lowered=True)


RULES = (norm, logsumexp)
