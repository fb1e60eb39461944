"""Look-ups in a table, their backward and the renormalisation of looked-up rows.

If a table is sharded by row, each rank looks up its own rows and leaves zeros for the rest. The sum over the ranks is
the look-up (masked partial results).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, einop, is_traced, rule, rule_from
from shardwise_embedding.lookup import own_rows, own_values

__all__ = ["RULES"]

aten = torch.ops.aten


def _masked_lookup(local: LocalCall, weight: Tensor, indices: Tensor, *_: Any, out: Tensor | None = None) -> Tensor:
    rows = own_values(local, weight, indices)
    return rows if out is None else out.copy_(rows)


EMBEDDING = rule(
    [aten.embedding.default, aten.embedding.out],
    "v d, ... -> ... d",
    reduce={"v": "sum"},
    moves="weight",
    lowering={"v": _masked_lookup},
    scattered=("...", "d"),
)


# -- backward ----------------------------------------------------------------------------------------------------


@rule_from(aten.embedding_dense_backward.default)
def embedding_backward(call: Call) -> Callable[[Call], Flow]:
    """Columns; over sharded indices a partial sum. Linear in the gradient."""
    batch = [f"...{d}" for d in range(call.args["indices"].ndim, 0, -1)]
    # How often an index occurs is a count over all shards.
    by_frequency = call.args["scale_grad_by_freq"]
    return einop(
        "... d, ... -> _ d",
        reduce={} if by_frequency else dict.fromkeys(batch, "sum"),
        replicate=batch if by_frequency else (),
        linear="grad_output",
        nonempty="d",  # CUDA's kernel reads outside of a gradient without columns
    )


# -- renormalisation ---------------------------------------------------------------------------------------------


def _renorm_own(local: LocalCall, table: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    whole = local.spec("self")
    own, relative = own_rows(local, whole, indices)
    # An index that no rank has stays out of bounds, so that it fails here as on one device.
    illegal = (indices < 0) | (indices >= whole.shape[0])
    if is_traced(table):
        at = torch.where(own, relative, torch.where(illegal, len(table) + 1, len(table)))
        return _renorm_touched(local, table, at, max_norm, norm_type)
    mine = torch.where(own, relative, table.shape[0])[own | illegal]
    split = local.sharding(whole, 1)
    if split:
        return _renorm_columns(local, table, torch.unique(mine), max_norm, norm_type)
    renormed: Tensor = aten.embedding_renorm_.default(table, mine, max_norm, norm_type) if mine.numel() else table
    return renormed


def _renorm_columns(local: LocalCall, table: Tensor, rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale down those of ``rows`` whose norm, over the columns of all ranks, is above ``max_norm``."""
    values = table.index_select(0, rows)
    scale = _scales(local, values, max_norm, norm_type)
    return table.index_copy_(0, rows, (values * scale.unsqueeze(1)).to(table.dtype))


def _renorm_touched(local: LocalCall, table: Tensor, at: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """The same in a graph, which cannot choose rows, because their number depends on data: it goes over all of them.

    Indices of other ranks are the number of this rank's rows.
    """
    touched = at.new_zeros(len(table) + 1, dtype=torch.bool).index_fill(0, at.reshape(-1), True)[:-1]
    scale = torch.where(touched, _scales(local, table, max_norm, norm_type), 1.0)
    return table.copy_((table * scale.unsqueeze(1)).to(table.dtype))


def _scales(local: LocalCall, rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """What each row is multiplied by."""
    norms = _norms(local, rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows, norm_type)
    # torch's kernel adds the same small number.
    return torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))


def _norms(local: LocalCall, values: Tensor, power: float) -> Tensor:
    """The norm of each row over the columns of all ranks, some of which may have none."""
    sizes, split = values.abs(), local.sharding(local.spec("self"), 1)
    if power == math.inf:
        return local.comm.all_reduce(torch.cat([sizes, sizes.new_zeros(len(sizes), 1)], 1).amax(1), "max", split)
    if power == -math.inf:
        padded = torch.cat([sizes, sizes.new_full((len(sizes), 1), math.inf)], 1)
        return local.comm.all_reduce(padded.amin(1), "min", split)
    if power == 0:
        return local.comm.all_reduce((sizes != 0).to(sizes.dtype).sum(1), "sum", split)
    return local.comm.all_reduce((sizes**power).sum(1), "sum", split) ** (1 / power)


RENORM = rule(aten.embedding_renorm_.default, "v d, R -> v d", lowering=_renorm_own)

RULES = (EMBEDDING, embedding_backward, RENORM)
