"""How many elements fall where: histograms, counts of integers, and where the rows of sorted indices begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.rule import Flow, TensorMeta, labels, rule_from

__all__ = ["RULES"]

aten = torch.ops.aten


@rule_from([aten.histc.default, aten.histc.out], static=("min", "max"))
def HISTC(x: TensorMeta, *, min: float = 0, max: float = 0) -> Flow:  # noqa: A002  # torch's names
    """With bounds in the call, the counts of shards add up; bounds from the data need the whole tensor."""
    if min == max or not x.dtype.is_floating_point or x.dtype.itemsize < torch.float32.itemsize:
        return Flow([None], [None])
    names = labels(x.ndim)
    return Flow([names], [[None]], reduce={name: "sum" for name in names if name})


@rule_from(
    [
        aten.bincount.default,
        aten.histogram.bin_ct,
        aten.histogram.bin_ct_out,
        aten.histogram.bins_tensor,
        aten.histogram.bins_tensor_out,
    ]
)
def WHOLE() -> Flow:
    """R -> R: the bins, or how many there are, depend on all elements."""
    return Flow([None], [None])


# -- in several dims; the meta device has no kernels for these -----------------------------------------------------


def _edges(x: torch.Tensor, bins: Sequence[int], **_: Any) -> list[torch.Tensor]:
    return [x.new_empty(n + 1) for n in bins]


@rule_from(aten._histogramdd_bin_edges.default, meta=_edges)
def EDGES() -> Flow:
    """R -> R: bounds from the data need the whole tensor."""
    return Flow([None], [None])


def _counts(x: torch.Tensor, bins: Sequence[int | torch.Tensor], **_: Any) -> torch.Tensor:
    return x.new_empty([n if isinstance(n, int) else n.numel() - 1 for n in bins])


@rule_from(
    [
        aten._histogramdd_from_bin_cts.default,
        aten._histogramdd_from_bin_cts.out,
        aten._histogramdd_from_bin_tensors.default,
        aten._histogramdd_from_bin_tensors.out,
    ],
    meta=_counts,
)
def COUNTS() -> Flow:
    """R -> R: bounds from the data need the whole tensor, and a density needs the sum of all counts."""
    return Flow([None], [None])


@rule_from(
    [
        aten._convert_indices_from_coo_to_csr.default,
        aten._convert_indices_from_coo_to_csr.out,
        aten._convert_indices_from_csr_to_coo.default,
        aten._convert_indices_from_csr_to_coo.out,
    ]
)
def ROWS() -> Flow:
    """R -> R: where rows of sorted indices begin, and back; torch does not check the order, so it needs all indices."""
    return Flow([None], [None])


RULES = (HISTC, WHOLE, EDGES, COUNTS, ROWS)
