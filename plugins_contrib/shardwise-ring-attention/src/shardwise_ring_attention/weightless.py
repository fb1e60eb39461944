"""What kernels return where no key has a weight because all scores are minus infinity.

The mathematics say minus infinity for the logsumexp. The kernels write something else, and a ring that took that at its
word would give such keys a weight beside the keys of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["MARKS", "Marks"]

aten = torch.ops.aten
_NOTHING = float("-inf")


@frozen
class Marks:
    """How one op marks queries whose keys have no weight.

    ``read(out, lse, query, key, causal)`` takes what the kernel returned and what it was given; it returns output and
    logsumexp with minus infinity where the keys have no weight. ``write`` takes a logsumexp like that, which it may
    overwrite, and returns it as the kernel would.
    """

    read: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    write: Callable[[Tensor], Tensor]


def _read_cpu(out: Tensor, lse: Tensor, query: Tensor, key: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Tell marks of the CPU's kernel from a single score of 0, which has the same logsumexp.

    Scores can be infinite only if the largest elements of a query and of its keys have no finite product. The kernel
    forgets a NaN where it finds no score above minus infinity, and writes the mark; such an output becomes NaN.
    """
    sizes = key.abs().amax(-1).repeat_interleave(query.shape[1] // key.shape[1], 1)
    least = sizes.cummin(-1).values if causal else sizes.amin(-1, keepdim=True)
    largest = query.abs().amax(-1) * least * query.shape[-1]
    marked = (lse == 0) & ((out == 0) | out.isnan()).all(-1)
    forgotten = (marked & largest.isnan()).unsqueeze(-1)
    lse = lse.masked_fill(marked & largest.isinf(), _NOTHING)
    return out.masked_fill(forgotten, torch.nan), lse.masked_fill(forgotten.squeeze(-1), torch.nan)


def _write_cpu(lse: Tensor) -> Tensor:
    return lse.masked_fill_(lse.isneginf(), 0)


def _read_cuda(out: Tensor, lse: Tensor, _query: Tensor, _key: Tensor, _causal: bool) -> tuple[Tensor, Tensor]:
    """Tell marks of CUDA's kernel from a NaN among the scores, which has the same logsumexp and an output of NaN."""
    return out, lse.masked_fill(lse.isposinf() & ~out.isnan().all(-1), _NOTHING)


def _write_cuda(lse: Tensor) -> Tensor:
    return lse.masked_fill_(lse.isneginf() | lse.isnan(), torch.inf)


MARKS: Mapping[Any, Marks] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: Marks(_read_cpu, _write_cpu),
    aten._scaled_dot_product_flash_attention.default: Marks(_read_cuda, _write_cuda),
}
