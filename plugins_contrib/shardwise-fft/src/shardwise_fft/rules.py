"""The rules of the three ops that the functions of ``torch.fft`` call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import REPLICATE, Call, LocalCall, Placement, Row, Rows, Rule, TensorMeta, like, rule_from, shard
from shardwise_fft.schedule import schedule
from shardwise_fft.steps import run_all

__all__ = ["RULES", "TRANSPOSING"]

aten = torch.ops.aten

C2C = (aten._fft_c2c.default, aten._fft_c2c.out)
R2C = (aten._fft_r2c.default, aten._fft_r2c.out)
C2R = (aten._fft_c2r.default, aten._fft_c2r.out)


# -- running -----------------------------------------------------------------------------------------------------


def transform(local: LocalCall, x: Tensor, *args: Any, out: Tensor | None = None) -> Tensor:
    """The lowering of all rows: exchanges shards of transformed dims for shards of others."""
    steps = local.once(schedule)
    x = x.resolve_conj().resolve_neg()
    if steps is not None:
        result = _dense(run_all(steps, local, x), local)
    elif x.numel():
        result = local.call.op.overloadpacket.default(x, *args)
    else:  # torch's kernels refuse an empty shard
        spec = local.outputs[0]
        assert spec is not None
        result = x.new_empty(local.local_shape(spec), dtype=spec.dtype)
    return result if out is None else out.copy_(result)


def _dense(x: Tensor, local: LocalCall) -> Tensor:
    """``x`` in the memory order of the whole result, so that the same views of it are possible."""
    result = local.outputs[0]
    assert result is not None
    order = sorted(range(x.ndim), key=lambda d: -result.stride[d])
    back = [order.index(d) for d in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)


# -- rows --------------------------------------------------------------------------------------------------------


def _rows(call: Call, *, keep: bool) -> Rows:
    """Dims that are not transformed pass; a transformed one stays sharded, or another is sharded in its place.

    Of rows with the same cost the first is chosen. With ``keep``, that is a row in which the transformed dim stays
    sharded. Named dims cannot say that a shard moves from one dim to another, so these rows are written out.
    """
    x = call.args["self"]
    dims = [d % x.ndim for d in call.args["dim"]]
    names = [f"d{d}" for d in range(x.ndim) if d not in dims]
    *others, whole = like(x, whole=dims, linear="self", lowered=names).bind(call).rows
    moving = [row for d in dims for row in _moving(call, d, dims, keep=keep)]
    return Rows((*others[: len(names)], *moving, *others[len(names) :], whole))


def _moving(call: Call, dim: int, dims: Sequence[int], *, keep: bool) -> list[Row]:
    x = call.args["self"]
    stay = _row(call, dim, shard(dim))
    moved = [_row(call, dim, shard(e)) for e in _places(x, dim, dims, forward=_is_forward(call))]
    # Gradients of real transforms slice half a spectrum and write to parts of it, which a sharded dim does not allow.
    if dim == dims[-1] and call.args.get("onesided"):
        return [*(moved or [_row(call, dim, REPLICATE)]), stay]
    return [stay, *moved] if keep else [*moved, stay]


def _row(call: Call, dim: int, result: Placement) -> Row:
    into = "" if result == shard(dim) else f" -> {result.dim if result.is_shard() else 'R'}"  # type: ignore[attr-defined]
    outs = len(call.out_operands)
    return Row((shard(dim), *(result,) * outs), (result,), f"transform {dim}{into}", lowered=True)


def _is_forward(call: Call) -> bool:
    return bool(call.args.get("forward", "onesided" in call.args))


def _places(x: TensorMeta, dim: int, dims: Sequence[int], *, forward: bool) -> list[int]:
    """The dims that may be sharded in place of a transformed one, the best first.

    First the transformed dims, from the next one on, and in an inverse transform from the one before. So a transform
    and its inverse end with the placement that they began with, and shards on several mesh dims do not ask for the same
    dim. Then the others, the largest first.
    """
    ring = sorted(dims)
    at = ring.index(dim)
    later = ring[at + 1 :] + ring[:at]
    rest = sorted((d for d in range(x.ndim) if d not in dims), key=lambda d: (-x.shape[d], d))
    return (later if forward else later[::-1]) + rest


# -- the rules ---------------------------------------------------------------------------------------------------


def _rule(ops: Sequence[Any], *, keep: bool) -> Rule:
    def describe(call: Call) -> Rows:
        return _rows(call, keep=keep)

    first = "a transformed dim stays sharded" if keep else "another dim is sharded in place of a transformed one"
    describe.__doc__ = f"Other dims pass; {first}, by all-to-all; linear."
    return rule_from(ops, lowering=transform, replaces="shardwise")(describe)


RULES = tuple(_rule(ops, keep=True) for ops in (C2C, R2C, C2R))
TRANSPOSING = tuple(_rule(ops, keep=False) for ops in (C2C, R2C, C2R))
