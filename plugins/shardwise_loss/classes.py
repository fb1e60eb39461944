"""Targets among sharded classes: which of them are a rank's own."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from shardwise.rule import LocalCall

__all__ = ["own_classes", "refusal_of_target"]

# Marks a target that is not among this rank's classes; no class has this number.
_NOT_OWN = -1


def refusal_of_target(error: IndexError, local: LocalCall, target: Tensor, ignore_index: int) -> IndexError:
    """The error of a kernel with the program's target in place of its number among this rank's classes."""
    spec = local.spec("self")
    outside = target[(target != ignore_index) & ((target < 0) | (target >= spec.shape[min(1, spec.ndim - 1)]))]
    if not outside.numel():
        return error
    return IndexError(re.sub(r"(?<=^Target )-?\d+(?= is out of bounds)", str(outside[0].item()), str(error)))


def own_classes(
    local: LocalCall, scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Scores, targets, class weights and the index to ignore, as they are among this rank's classes.

    ``local.call`` has the scores as ``self``, their classes as dim 1 (dim 0 of one sample). A target that no rank has
    stays out of bounds on each, so that the op fails here as it fails on one device.
    """
    spec = local.spec("self")
    dim = min(1, spec.ndim - 1)
    if not local.sharding(spec, dim):
        return scores, target, weight, ignore_index
    first, count = local.offset(spec)[dim], scores.shape[dim]
    relative = target - first
    counts = target != ignore_index
    own = counts & (relative >= 0) & (relative < count)
    illegal = counts & ((target < 0) | (target >= spec.shape[dim]))
    safe = torch.where(own, relative, torch.where(illegal, max(1, count), _NOT_OWN))
    if count == 0:
        # The kernels take no scores without classes.
        scores = scores.new_zeros([1 if d == dim else n for d, n in enumerate(scores.shape)])
        weight = None if weight is None else weight.new_zeros(1)
    return scores, safe, weight, _NOT_OWN
