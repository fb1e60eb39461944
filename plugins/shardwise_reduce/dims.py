"""The dims that a reduction reduces, and how the other ones flow to its result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.rule import Call, Facts, Flow, Labels, LocalCall, Op, labels, linear

__all__ = ["accumulator", "into", "kept", "ops", "reduced_dims", "reduction", "splitting", "sums"]


def ops(names: str) -> tuple[Op, ...]:
    """The overloads named: ``"sum.default sum.out"``."""
    pairs = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs)


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims of ``self`` that the call reduces, from its ``dim`` argument: ``None``, an int, or a list."""
    ndim = call.args["self"].ndim
    dim = call.args.get("dim")
    if isinstance(dim, int):
        return (dim % ndim,) if ndim else ()
    if dim:
        return tuple(sorted({d % ndim for d in dim})) if ndim else ()
    # Most ops read an empty list as all dims, any.dims and all.dims as no dims: the shape of the result shows which.
    result = call.outputs[0]
    is_unreduced = dim is not None and ndim and result is not None and result.shape == call.args["self"].shape
    return () if is_unreduced else tuple(range(ndim))


def kept(call: Call, names: Labels) -> Labels:
    """The dims of the result: without the reduced ones, or with size one in their place (``keepdim``)."""
    dims, keepdim = reduced_dims(call), call.args.get("keepdim", False)
    return tuple(None if d in dims else name for d, name in enumerate(names) if keepdim or d not in dims)


def reduction(call: Call, kind: str, *, partial: Iterable[str | Facts] = (), lowered: bool = False) -> Flow:
    """Kept dims pass, a sharded reduced dim gives a partial ``kind`` (``R``: a lowering makes the result whole)."""
    names = labels(call.args["self"].ndim)
    gone = {f"d{d}": kind for d in reduced_dims(call)}
    return Flow([names], [kept(call, names)], reduce=gone, partial=partial, lowered=gone if lowered else ())


def sums(before: torch.dtype, after: torch.dtype) -> tuple[str | Facts, ...]:
    """The partial rows of an op that adds up: none where a cast comes first that does not commute with adding.

    Averages of integers are cut off, which does not commute either.
    """
    if before.is_floating_point or before.is_complex:
        return (linear("self"),) if after.is_floating_point or after.is_complex else ()
    return ("sum -> sum",) if before == after != torch.bool else ()


# -- for lowerings -----------------------------------------------------------------------------------------------


def splitting(local: LocalCall) -> tuple[int, ...]:
    """The mesh dims that split a reduced dim."""
    dims = reduced_dims(local.call)
    return local.sharding(local.spec("self"), *dims) if dims else ()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: at least float32 for floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def into(local: LocalCall, result: torch.Tensor, out: torch.Tensor | None, at: int = 0) -> torch.Tensor:
    """``result`` with the dtype and local shape that result ``at`` has, in ``out`` when there is one."""
    spec = local.outputs[at]
    assert spec is not None
    result = result.reshape(local.local_shape(spec)).to(spec.dtype)
    return result if out is None else out.copy_(result)
