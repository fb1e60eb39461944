"""The dims that a reduction reduces, and how the other ones flow to its result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.rule import Call, Facts, Flow, Labels, LocalCall, Op, labels, linear

__all__ = ["accumulator", "into", "ops", "reduced_dims", "reduction", "result_labels", "split_mesh_dims", "sums"]


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
    # Most ops read an empty list as all dims; any.dims and all.dims read it as no dims. The result's shape shows which,
    # but where every dim has one element.
    result, packet = call.outputs[0], call.op.overloadpacket
    is_unreduced = (
        dim is not None
        and packet in (torch.ops.aten.any, torch.ops.aten.all)
        and result is not None
        and result.shape == call.args["self"].shape
    )
    return () if is_unreduced else tuple(range(ndim))


def result_labels(call: Call, names: Labels) -> Labels:
    """The labels of the result: a reduced dim is dropped, or has size one in its place (``keepdim``)."""
    dims, keepdim = reduced_dims(call), call.args.get("keepdim", False)
    return tuple(None if d in dims else name for d, name in enumerate(names) if keepdim or d not in dims)


def reduction(
    call: Call, kind: str, *, partial: Iterable[str | Facts] = (), lowered: bool = False, in_order: bool = False
) -> Flow:
    """The flow of a reduction: the other dims pass, and a sharded reduced dim gives a partial ``kind``.

    With ``R`` for the kind, a lowering makes the result whole. ``in_order`` says that it needs to know where shards
    start. Reduced dims stay whole if there is nothing to reduce: torch refuses that for some ops, and knows no neutral
    value of theirs.
    """
    x, dims = call.args["self"], reduced_dims(call)
    names, kinds = labels(x.ndim), {f"d{d}": kind for d in dims}
    if 0 in (x.shape[d] for d in dims):
        names, kinds = tuple(None if d in dims else name for d, name in enumerate(names)), {}
    return Flow(
        [names],
        [result_labels(call, names)],
        reduce=kinds,
        partial=partial,
        lowered=kinds if lowered else (),
        scattered=() if in_order else kinds,
    )


def sums(before: torch.dtype, after: torch.dtype) -> tuple[str | Facts, ...]:
    """The partial rows of an op that adds up. There is no row if the op first casts and the cast changes sums.

    An average of integers is truncated, so it has no row either.
    """
    if before.is_floating_point or before.is_complex:
        return (linear("self"),) if after.is_floating_point or after.is_complex else ()
    return ("sum -> sum",) if before == after != torch.bool else ()


# -- for lowerings -----------------------------------------------------------------------------------------------


def split_mesh_dims(local: LocalCall) -> tuple[int, ...]:
    """The mesh dims that split a reduced dim."""
    dims = reduced_dims(local.call)
    return local.sharding(local.spec("self"), *dims) if dims else ()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: at least float32 for floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def into(local: LocalCall, result: torch.Tensor, out: torch.Tensor | None, at: int = 0) -> torch.Tensor:
    """``result`` in the dtype and local shape of output ``at``; copied into ``out`` if the call has one."""
    spec = local.outputs[at]
    assert spec is not None
    result = result.reshape(local.local_shape(spec)).to(spec.dtype)
    return result if out is None else out.copy_(result)
