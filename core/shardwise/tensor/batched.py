"""Tensors of transforms around a MeshTensor: how they lie, seen without the dims that ``vmap`` hides.

``torch.func`` gives a function that it transforms a plain tensor around each MeshTensor. The dims of that tensor are
some of the MeshTensor's, so its placements are the MeshTensor's with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.kernel.engine import tensor_class
from shardwise.kernel.placements import (
    REPLICATE,
    Placement,
    shard_dim,
    split_factor,
    strided_shard,
)
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.transforms import above_batches, below_batches, held, is_wrapped

__all__ = ["batched_spec", "in_batches", "is_on_mesh", "lie_alike", "moved", "spec_of"]


def is_on_mesh(tensor: Any) -> bool:
    """Whether a tensor is a MeshTensor or a transform's around one."""
    if isinstance(tensor, tensor_class()):
        return True
    if not isinstance(tensor, torch.Tensor):
        return False
    if is_wrapped(tensor):
        return isinstance(held(tensor)[0], tensor_class())
    return isinstance(below_batches(tensor)[0], tensor_class())


def spec_of(tensor: Any) -> TensorSpec:
    """The spec of a MeshTensor; of a transform's tensor around one, what it is without the hidden dims.

    Where a mesh dim divides a hidden dim, each of the tensors that ``vmap`` goes over is whole on some ranks, and the
    spec says replicated: ``to_local()`` brings all of them to all ranks.
    """
    if isinstance(tensor, tensor_class()):
        return tensor._spec  # type: ignore[no-any-return]
    inside, places = held(tensor)
    if inside is tensor:
        inside, levels = below_batches(tensor)
        places = [d + len(levels) for d in places]
    return TensorSpec(inside._spec.mesh, _seen(inside._spec.placements, places), TensorMeta.of(tensor))


def _seen(placements: Sequence[Placement], places: Sequence[int]) -> tuple[Placement, ...]:
    def one(placement: Placement) -> Placement:
        dim = shard_dim(placement)
        if dim is None:
            return placement
        return strided_shard(places.index(dim), split_factor(placement)) if dim in places else REPLICATE

    return tuple(map(one, placements))


def moved(placements: Sequence[Placement], hidden: int | None, by: int = 1) -> tuple[Placement, ...]:
    """Placements of a tensor, for one that has ``by`` more dims at the place ``hidden``."""
    return tuple(
        placement
        if hidden is None or (dim := shard_dim(placement)) is None
        else strided_shard(dim if dim < hidden else dim + by, split_factor(placement))
        for placement in placements
    )


def batched_spec(spec: TensorSpec, sizes: Sequence[int]) -> TensorSpec:
    """The spec of several such tensors as one, with the dims of these sizes in front."""
    meta = spec.tensor_meta
    step = max([1, *(n * s for n, s in zip(meta.shape, meta.stride, strict=True))])
    strides: list[int] = []
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    batch = TensorMeta((*sizes, *meta.shape), (*strides, *meta.stride), meta.dtype)
    return TensorSpec(spec.mesh, moved(spec.placements, 0, len(sizes)), batch)


def lie_alike(tensor: Any, other: Any) -> bool:
    """Whether two tensors lie in the same way on all ranks: views of both then do."""
    if not (isinstance(tensor, tensor_class()) and isinstance(other, tensor_class())):
        return False
    mine, its = tensor._spec, other._spec
    return bool(mine.placements == its.placements and mine.tensor_meta == its.tensor_meta)


def in_batches(run: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """``run(tensor, n)`` of a tensor that autograd's ``vmap`` goes over, with the ``n`` dims that it hides in front."""
    inside, levels = below_batches(tensor)
    return above_batches(run(inside, len(levels)), levels)
