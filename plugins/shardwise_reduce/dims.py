"""The dims that a reduction reduces, and how the other ones flow to its result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.rule import Call, Flow, LocalCall, Op

__all__ = ["accumulator", "into", "ops", "reduced_dims", "reduction", "splitting"]


def ops(names: str) -> tuple[Op, ...]:
    """The overloads named: ``"sum.default sum.out"``."""
    found = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, packet), tag) for packet, tag in found)


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims of ``self`` that the call reduces, from its ``dim`` argument: ``None``, an int, or a list."""
    ndim = call.args["self"].ndim
    given = call.args.get("dim")
    if isinstance(given, int):
        return (given % ndim,) if ndim else ()
    if given:
        return tuple(sorted({d % ndim for d in given})) if ndim else ()
    # Most ops read an empty list as all dims, any.dims and all.dims as none: the result's shape tells.
    result = call.outputs[0]
    nothing = given is not None and ndim and result is not None and result.shape == call.args["self"].shape
    return () if nothing else tuple(range(ndim))


def reduction(call: Call, kind: str, *, partial: Iterable[str] = (), lowered: bool = False) -> Flow:
    """Kept dims pass, a sharded reduced dim leaves a partial ``kind`` (``R``: a lowering finishes the job)."""
    x, dims = call.args["self"], reduced_dims(call)
    keepdim = bool(call.args.get("keepdim", False))
    labels = tuple(f"d{d}" for d in range(x.ndim))
    result = tuple(None if d in dims else labels[d] for d in range(x.ndim) if keepdim or d not in dims)
    gone = {labels[d]: kind for d in dims}
    return Flow([labels], [result], reduce=gone, partial=partial, lowered=gone if lowered else ())


# -- for lowerings -----------------------------------------------------------------------------------------------


def splitting(local: LocalCall) -> tuple[int, ...]:
    """The mesh dims that split a reduced dim."""
    dims = reduced_dims(local.call)
    return local.sharding(local.spec("self"), *dims) if dims else ()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in: at least float32 for floats of any width."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def into(local: LocalCall, result: torch.Tensor, out: torch.Tensor | None, at: int = 0) -> torch.Tensor:
    """A lowering's answer: ``result`` with the dtype and local shape of result ``at``, in ``out`` when there is one."""
    spec = local.outputs[at]
    assert spec is not None
    shaped = result.reshape(local.local_shape(spec)).to(spec.dtype)
    return shaped if out is None else out.copy_(shaped)
