"""The k largest or smallest values along a dim; if the dim is sharded, each shard sends only its candidates."""

from __future__ import annotations

import torch

from shardwise.rule import Call, Flow, LocalCall, dim_of, labels, replaced, rule_from
from shardwise_reduce.dims import into, ops
from shardwise_reduce.line import Line, line_of

__all__ = ["RULES"]

Pair = tuple[torch.Tensor, torch.Tensor]


def _candidates(local: LocalCall, line: Line, x: torch.Tensor, k: int, largest: bool) -> Pair:
    """The best ``k`` of each shard, in the order of the shards, and their positions in the whole dim."""
    lengths = [min(k, n) for n in line.lengths]
    values, positions = x.topk(lengths[line.place], line.at, largest, True)
    positions = positions + local.offset(local.spec("self"))[line.at]
    return (
        torch.cat(line.gather(local, values, lengths), line.at),
        torch.cat(line.gather(local, positions, lengths), line.at),
    )


def _is_ambiguous(ranked: torch.Tensor, at: int) -> bool:
    """Whether equal values, or several NaN, stand next to each other."""
    left, right = ranked.narrow(at, 1, ranked.shape[at] - 1), ranked.narrow(at, 0, ranked.shape[at] - 1)
    same = left == right
    if ranked.is_floating_point():
        same |= left.isnan() & right.isnan()
    return bool(same.any())


def _best(local: LocalCall, x: torch.Tensor, k: int, largest: bool, in_order: bool) -> Pair:
    """The ``k`` best values of the whole dim, and their positions.

    torch does not document which of several equal values it returns. So if two candidates are equal, its own op runs
    on the gathered dim. Every rank sees the same candidates, so all ranks decide the same.
    """
    line = line_of(local)
    # A traced tensor has no values to look at.
    if type(x) is torch.Tensor:
        # One more than k shows whether the last value has an equal.
        candidates, positions = _candidates(local, line, x, k + 1, largest)
        ranked, order = candidates.topk(min(k + 1, candidates.shape[line.at]), line.at, largest, True)
        if k == 0 or not _is_ambiguous(ranked, line.at):
            return ranked.narrow(line.at, 0, k), positions.gather(line.at, order).narrow(line.at, 0, k)
    whole = torch.cat(line.gather(local, x, line.lengths), line.at)
    values, positions = whole.topk(k, line.at, largest, in_order)
    return values, positions


def _topk(
    local: LocalCall,
    x: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    in_order: bool = True,
    **outs: torch.Tensor,
) -> Pair:
    values, positions = _best(local, x, k, largest, in_order)
    first, second = list(outs.values()) or (None, None)
    return into(local, values, first), into(local, positions, second, 1)


@rule_from(ops("topk.default topk.values"), lowering=_topk)
def TOPK(call: Call) -> Flow:
    """Any dim; along the op's own dim, each shard sends its best values."""
    x, k = call.args["self"], call.args["k"]
    at = dim_of(call.args["dim"], x.ndim)
    result = labels(x.ndim, whole={at})
    # torch does not document the order of unsorted values, so these need the whole dim. For a large k little is saved.
    may_cut = x.ndim and call.args["sorted"] and 4 * k <= x.shape[at]
    return Flow([replaced(result, at, "cut") if may_cut else result], [result], reduce={"cut": "R"}, lowered="cut")


RULES = (TOPK,)
