"""Layouts on data: take one rank's local part of a whole tensor, and assemble the parts of all ranks.

These are pure functions of tensors and specs, without a process group. ``redistribute`` obeys the same laws:

* mesh dims split a tensor dim from left to right, and each splits as ``torch.chunk`` does; a strided shard splits one
  of the factors of the dim (:mod:`shardwise.kernel.factors`);
* a partial tensor is reduced from the last mesh dim to the first. The order matters if the reductions differ (a sum of
  maxima is not a maximum of sums). With this order rules compose mesh dim by mesh dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.errors import LayoutError
from shardwise.kernel.mesh import coordinates
from shardwise.kernel.placements import Partial, Placement, Shard
from shardwise.kernel.reductions import IDEMPOTENT_KINDS, neutral, reduce_pieces
from shardwise.kernel.spec import TensorSpec

__all__ = ["assemble", "scatter_local"]

Coordinate = tuple[int, ...]


def scatter_local(full: Tensor, spec: TensorSpec, coordinate: Sequence[int] | None = None) -> Tensor:
    """The local tensor of the rank at ``coordinate`` (default: this process) of a whole tensor.

    ``full`` has the spec's global shape. The result has ``spec.local_shape(coordinate)``, keeps the order of the
    strides and owns its memory. A partial sum has the value at coordinate 0 of its mesh dim and -0.0 elsewhere. A
    partial product has ones elsewhere. Partial avg, max and min have the value on every rank.
    """
    if full.shape != spec.shape:
        raise LayoutError(
            asked=f"scatter a tensor of shape {tuple(full.shape)}",
            found=f"the spec is {spec}",
            do="Give a tensor of the spec's global shape.",
            shape=tuple(full.shape),
            spec=spec,
        )
    where = spec.coordinate() if coordinate is None else tuple(coordinate)
    if spec.is_strided:
        inner = spec.unflattened(spec.factors)
        return scatter_local(full.view(inner.shape), inner, where).reshape(spec.local_shape(where))
    sizes, starts = spec.local_shape_and_offset(where)
    part = full
    for dim, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        part = part.narrow(dim, start, size)
    # Later mesh dims are reduced first, so the last reduction that leaves this rank blank decides the fill.
    blanked = [kind for m, kind in spec.reductions.items() if where[m] and kind not in IDEMPOTENT_KINDS]
    if blanked:
        return torch.full_like(part, neutral(blanked[-1], spec.dtype))
    # A plain clone keeps the whole tensor's strides on dims of one element. Some torch kernels fail on those.
    return part.clone(memory_format=torch.contiguous_format if full.is_contiguous() else torch.preserve_format)


def assemble(locals_by_coordinate: Mapping[Coordinate, Tensor], spec: TensorSpec) -> Tensor:
    """The whole tensor, from the local tensors of all ranks of the mesh.

    Floating sums are computed in float64 and rounded once to the spec's dtype. Of replicated copies the first is used;
    values are not compared. Raises :class:`LayoutError` if a rank is missing or a local tensor does not have the shape
    that the spec gives its rank.
    """
    for coordinate, local in locals_by_coordinate.items():
        _check_local(coordinate, local, spec)
    expected = coordinates(spec.mesh_shape)
    missing = [c for c in expected if c not in locals_by_coordinate]
    if missing:
        raise LayoutError(
            asked=f"assemble {spec}",
            found=f"no local tensor for the ranks at {missing}",
            do="Give one local tensor per coordinate of the mesh.",
            missing=missing,
        )
    if spec.is_strided:
        inner = spec.unflattened(spec.factors)
        parts = {c: locals_by_coordinate[c].reshape(inner.local_shape(c)) for c in expected}
        return assemble(parts, inner).reshape(spec.shape)
    parts = {c: locals_by_coordinate[c] for c in expected}
    for mesh_dim in reversed(range(len(spec.mesh_shape))):
        heads = dict.fromkeys(c[:mesh_dim] for c in parts)
        size = spec.mesh_shape[mesh_dim]
        placement = spec.placements[mesh_dim]
        parts = {head: _join([parts[(*head, i)] for i in range(size)], placement) for head in heads}
    return parts[()]


def _check_local(coordinate: Coordinate, local: Tensor, spec: TensorSpec) -> None:
    expected = spec.local_shape(coordinate)
    if tuple(local.shape) != expected:
        raise LayoutError(
            asked=f"assemble {spec}",
            found=f"the rank at {coordinate} has a local tensor of shape {tuple(local.shape)}, not {expected}",
            do="Give every rank the shard that spec.local_shape says.",
            coordinate=coordinate,
            shape=tuple(local.shape),
            expected=expected,
        )


def _join(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(list(pieces), placement.dim)
    if isinstance(placement, Partial):
        return reduce_pieces(pieces, placement.reduce_op)
    return pieces[0]
