"""Cross entropy of a projection in one op, which never holds all scores: the batch may be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, Rule, rule_from, whole

__all__ = ["RULES"]

# torch registers these ops when this module is imported; older versions do not have it.
with suppress(ImportError):
    import torch.nn.modules.linear_cross_entropy


def _total_weight(local: LocalCall, target: Tensor, weight: Tensor | None) -> Tensor:
    """The weights of all ranks' targets, the ignored ones left out."""
    counts = target != local.arg("ignore_index")
    each = counts.float() if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0)
    return local.comm.all_reduce(each.sum(), "sum", local.sharding(local.spec("target")))


def _share(local: LocalCall, *args: Any) -> tuple[Tensor, ...]:
    """A rank's share of a mean, and of its gradients: its sum, divided by the total weight of all ranks."""
    names = [a.name for a in local.call.signature.args]
    arguments = dict(zip(names, args, strict=True)) | {"reduction": "sum"}
    sums: tuple[Tensor, ...] = local.call.op(*arguments.values())
    if local.arg("reduction") != "mean":
        return sums
    total = _total_weight(local, arguments["target"], arguments["weight"])
    return tuple((value / total).to(value.dtype) for value in sums)


def _reduced(call: Call) -> Flow:
    """Batch; the loss and the gradients of what every sample uses are partial sums."""
    by_input = ("n", None) if call.args["compute_input_grad"] else (None, None)
    inputs = [("n", None), None, ("n",), None, None]
    if call.args["reduction"] not in ("sum", "mean"):
        return whole(call)
    if call.args["compute_input_grad"]:
        return Flow(inputs, [None, by_input, None, None], reduce={"n": "sum"}, lowered="n", nonempty={"n"})
    row = "n, R, n, R, R -> sum, R, sum, sum"
    return Flow(inputs, [None, by_input, None, None], replicate={"n"}, lowered=row, nonempty={"n"})


def _each(call: Call) -> Flow:
    """Batch."""
    return Flow([("n", None), None, ("n",), None, None], [("n",)], nonempty={"n"})


def _rules() -> Iterator[Rule]:
    ops = torch.ops.torch_nn
    if hasattr(ops, "_linear_cross_entropy_batch_chunked"):
        yield rule_from(ops._linear_cross_entropy_batch_chunked.default, lowering=_share)(_reduced)
    if hasattr(ops, "_linear_cross_entropy_batch_chunked_no_reduction"):
        yield rule_from(ops._linear_cross_entropy_batch_chunked_no_reduction.default)(_each)


RULES = tuple(_rules())
