"""Embedding bags: rows of a table added up, averaged or compared, bag by bag.

The table may be sharded by column. For sums and means it may also be sharded by row: a rank adds up its own rows, and
the sum over the ranks is the bag. Indices and offsets are whole, so every rank knows the bags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, LocalCall, Rows, TensorMeta, rule_from
from shardwise_embedding.lookup import own_rows, own_values

__all__ = ["RULES"]

aten = torch.ops.aten

# The values of ATen's ``mode`` argument.
SUM, MEAN, MAX = 0, 1, 2


# -- forward -----------------------------------------------------------------------------------------------------


def _results(call: Call, device_type: str) -> list[TensorMeta | None]:
    """What the kernels of a device return: on the CPU, bag sizes and positions of maxima depend on the mode.

    The bag of each index is always returned. A CPU kernel leaves it out where it can, and its backward then resizes a
    tensor to compute it. A tensor on a mesh cannot be resized.
    """
    result, bag_of_index, sizes, places = call.outputs
    if device_type != "cpu" or result is None or sizes is None or places is None:
        return [result, bag_of_index, sizes, places]
    mode, bags = call.args["mode"], result.shape[0]
    only = call.op.overloadpacket is aten._embedding_bag_forward_only and mode == SUM
    count = call.args["offsets"].shape[0] if only else bags
    shape = result.shape if mode == MAX else (count,)
    return [
        result,
        bag_of_index,
        TensorMeta.contiguous((count,), sizes.dtype),
        TensorMeta.contiguous(tuple(shape), sizes.dtype),
    ]


def _bag_of_index(offsets: Tensor, count: int, bags: int) -> Tensor:
    at = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    return torch.bucketize(at, offsets[:bags], right=True).sub_(1).to(offsets.dtype)


def _summed(
    local: LocalCall, weight: Tensor, indices: Tensor, bag_of: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The bags of this rank's rows, and how many indices each bag has over all ranks."""
    result = local.outputs[0]
    assert result is not None
    padding = local.arg("padding_idx")
    try:
        values = own_values(local, weight, indices)
    except IndexError as error:  # kernels of bags raise another error than those of look-ups
        count = local.spec("weight").shape[0]
        wrong = int(indices[(indices < 0).logical_or_(indices >= count)][0])
        msg = f"embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be {wrong}"
        raise RuntimeError(msg) from error
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    counts = indices != padding if padding >= 0 else torch.ones_like(indices, dtype=torch.bool)
    values = values.masked_fill(counts.logical_not().unsqueeze(-1), 0)
    if scale is not None:
        values = values * scale.unsqueeze(-1)
    sizes = torch.zeros(result.shape[0], dtype=bag_of.dtype, device=bag_of.device)
    sizes.index_add_(0, bag_of, counts.to(bag_of.dtype))
    bags = values.new_zeros(result.shape[0], values.shape[1]).index_add_(0, bag_of, values)
    return bags, sizes


def _bags(local: LocalCall, weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The bags of the table's rows or columns that this rank has."""
    result, bag_of_index, sizes_spec, places_spec = local.outputs
    assert result is not None
    assert bag_of_index is not None
    assert sizes_spec is not None
    assert places_spec is not None
    bag_of = _bag_of_index(offsets, indices.shape[0], result.shape[0])
    if not local.sharding(local.spec("weight"), 0) and weight.numel():
        bags, _, *others = local.call.op(weight, indices, offsets, *args)
        return bags, bag_of.to(bag_of_index.dtype), *others
    mode = local.arg("mode")
    bags, counts = _summed(local, weight, indices, bag_of, args[3])
    if mode == MEAN:
        bags = bags / counts.clamp(min=1).unsqueeze(-1)
        sizes = counts.to(sizes_spec.dtype)
    else:
        sizes = torch.zeros(sizes_spec.shape, dtype=sizes_spec.dtype, device=bags.device)
    # A card has no positions of maxima for sums and means.
    places = sizes.clone() if places_spec.shape == sizes_spec.shape else sizes.new_zeros(places_spec.shape)
    return bags.to(result.dtype), bag_of.to(bag_of_index.dtype), sizes, places


@rule_from([aten._embedding_bag.default, aten._embedding_bag_forward_only.default], lowering=_bags, results=_results)
def forward(call: Call) -> Flow:
    """Columns; for sums and means also rows, which give partial sums.

    It is long because the mode decides what the four results hold.
    """
    mode = call.args["mode"]
    places = (None, "d") if mode == MAX else None
    by_row = [] if mode == MAX else ["v, R, R, R -> sum, R, R, R"]
    return Flow(
        [("v", "d"), None, None, None],
        [(None, "d"), None, None, places],
        reduce={"d": "R"},
        replicate={"v"},
        partial=by_row,
        lowered=("*", "R"),
        nonempty={"d"},
    )


# -- backward ----------------------------------------------------------------------------------------------------


@rule_from([aten._embedding_bag_dense_backward.default, aten._embedding_bag_backward.default])
def backward(call: Call) -> Flow | Rows:
    """Columns; linear in the gradient. A sparse gradient has no row: its layout cannot lie on a mesh."""
    if call.args.get("sparse"):
        return Rows(())
    places = (None, "d") if call.args["mode"] == MAX else None
    dims = {"grad": (None, "d"), "maximum_indices": places}
    return Flow(
        [dims.get(name) for name in call.operand_names],
        [(None, "d")],
        linear="grad",
        nonempty={"d"},
    )


def _by_scale(
    local: LocalCall,
    gradient: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_of: Tensor,
    mode: int,
    padding: int,
) -> Tensor:
    """The gradient by each index's weight, of the table's rows that this rank has."""
    assert mode == SUM  # other modes take no weights
    if not bag_of.numel():  # torch's own forward may leave it out
        bag_of = _bag_of_index(offsets, indices.shape[0], gradient.shape[0])
    own, _relative = own_rows(local, local.spec("weight"), indices)
    values = own_values(local, weight, indices)
    products = (gradient.index_select(0, bag_of) * values).sum(1)
    return products.masked_fill(own.logical_not() | (indices == padding), 0) if padding >= 0 else products


@rule_from(aten._embedding_bag_per_sample_weights_backward.default, lowering=_by_scale)
def by_scale(call: Call) -> Flow:
    """Columns and rows; the products are then partial sums."""
    return Flow(
        [(None, "d"), ("v", "d"), None, None, None],
        [(None,)],
        reduce={"v": "sum", "d": "sum"},
        lowered={"v"},
        nonempty={"d"},
    )


RULES = (forward, backward, by_scale)
