"""Running sums, products and extremes. Over a sharded dim each shard starts from the totals of the earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.rule import Call, Facts, Flow, LocalCall, Lowering, Op, Rule, dim_of, labels, replaced, rule_from
from shardwise_reduce.dims import into, ops, sums
from shardwise_reduce.line import line_of

__all__ = ["RULES"]

Scan = Callable[[torch.Tensor, int], torch.Tensor]
Partials = Callable[[torch.dtype], Sequence[str | Facts]]


def _along(of: tuple[Op, ...], lowering: Lowering, partial: Partials = lambda _: (), text: str = "") -> Rule:
    """A rule for ops that run along their argument ``dim`` and keep the shape; ``text`` describes ``partial``."""

    def describe(call: Call) -> Flow:
        x, result = call.args["self"], call.outputs[0]
        # The logarithm of a complex sum has several branches, and a part of the sum may be on another one.
        may_cut = x.ndim and not (x.dtype.is_complex and "logcumsumexp" in str(call.op))
        at = dim_of(call.args["dim"], x.ndim)
        names = replaced(labels(x.ndim), at, "cut" if may_cut else None) if x.ndim else ()
        same = result is not None and result.dtype == x.dtype != torch.bool
        return Flow([names], [names], partial=partial(x.dtype) if same else (), lowered="cut")

    describe.__doc__ = f"Any dim; along a sharded one each shard starts from the totals of the earlier ones.{text}"
    return rule_from(of, lowering=lowering)(describe)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to run in: a shard's total may overflow even if no value of the result does."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _scanning(scan: Scan, total: Scan) -> Lowering:
    def lowering(local: LocalCall, x: torch.Tensor, dim: Any, *, out: Any = None, **_: Any) -> torch.Tensor:
        line, spec = line_of(local), local.outputs[0]
        assert spec is not None
        cast = x.to(_wide(spec.dtype))
        totals = line.gather(local, total(cast, line.at), [1] * len(line.lengths))
        # The totals in front of the shard's own elements: the scan itself adds them up, in the order of the shards.
        joined = torch.cat([*totals[: line.place], cast], line.at)
        values = scan(joined, line.at).narrow(line.at, line.place, cast.shape[line.at])
        return into(local, values, x if local.call.signature.args[0].written else out)

    return lowering


def _scanned(
    scan: Callable[..., Any], values: torch.Tensor, places: torch.Tensor, at: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running extreme and its position; the op refuses an empty dim."""
    if not values.numel():
        return values, places
    extremes, positions = scan(values, at)
    return extremes, places.gather(at, positions)


def _extremes(scan: Callable[..., Any]) -> Lowering:
    def lowering(local: LocalCall, x: torch.Tensor, dim: Any, **outs: torch.Tensor) -> Any:
        line = line_of(local)
        at, size = line.at, x.shape[line.at]
        start = local.offset(local.spec("self"))[at]
        own = torch.arange(start, start + size, device=x.device).view([-1 if d == at else 1 for d in range(x.ndim)])
        values, positions = _scanned(scan, x, own.expand(x.shape), at)
        lengths = [min(1, n) for n in line.lengths]
        last = (t.narrow(at, max(0, size - 1), min(1, size)) for t in (values, positions))
        best, where = (line.gather(local, t, lengths)[: line.place] for t in last)
        values, positions = _scanned(scan, torch.cat([*best, x], at), torch.cat([*where, own.expand(x.shape)], at), at)
        values, positions = (t.narrow(at, t.shape[at] - size, size) for t in (values, positions))
        first, second = list(outs.values()) or (None, None)
        return into(local, values, first), into(local, positions, second, 1)

    return lowering


CUMSUM = _along(
    ops("cumsum.default cumsum_.default cumsum.out"),
    _scanning(torch.cumsum, lambda x, dim: x.sum(dim, keepdim=True, dtype=x.dtype)),
    lambda dtype: sums(dtype, dtype),
    " Linear.",
)
CUMPROD = _along(
    ops("cumprod.default cumprod_.default cumprod.out"),
    _scanning(torch.cumprod, lambda x, dim: x.prod(dim, keepdim=True, dtype=x.dtype)),
    lambda _: ["product -> product"],
    " Products pass.",
)
LOGCUMSUMEXP = _along(
    ops("logcumsumexp.default logcumsumexp.out"),
    _scanning(torch.logcumsumexp, lambda x, dim: x.logsumexp(dim, keepdim=True)),
)
CUMMAX = _along(ops("cummax.default cummax.out"), _extremes(torch.cummax))
CUMMIN = _along(ops("cummin.default cummin.out"), _extremes(torch.cummin))

RULES = (CUMSUM, CUMPROD, LOGCUMSUMEXP, CUMMAX, CUMMIN)
