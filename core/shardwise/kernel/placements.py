"""Placements: torch's own classes, their short form in tables and messages, and the checks on a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardwise.errors import PlacementCountError, PlacementError
from shardwise.kernel.reductions import REDUCE_OPS

__all__ = [
    "REPLICATE",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "check_placements",
    "parse_placement",
    "partial",
    "shard",
    "show",
    "show_all",
]

REPLICATE = Replicate()


@cache
def shard(dim: int) -> Shard:
    """``Shard(dim)``, one object per dim."""
    return Shard(dim)


@cache
def partial(kind: str) -> Partial:
    """``Partial(kind)``, one object per kind."""
    return Partial(kind)


def show(placement: Placement | None) -> str:
    """The short form used in tables and messages: ``S(0)``, ``R``, ``P(sum)``; ``-`` for an absent operand."""
    if placement is None:
        return "-"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else repr(placement)


def show_all(placements: Sequence[Placement | None]) -> str:
    """The short forms of a list, in brackets: ``[S(0), R]``."""
    return "[" + ", ".join(map(show, placements)) + "]"


def parse_placement(text: str) -> Placement:
    """The inverse of :func:`show`; also takes ``P`` for ``P(sum)``."""
    word = text.strip()
    if word == "R":
        return REPLICATE
    head, _, rest = word.partition("(")
    inner = rest.rstrip(")").strip()
    if head == "S" and inner.isdigit():
        return shard(int(inner))
    if head == "P" and (inner or "sum") in REDUCE_OPS:
        return partial(inner or "sum")
    raise PlacementError(
        asked=f"read the placement {text!r}",
        found="it is not S(d), R or P(kind)",
        do=f"Write S(0), R or P(sum); the reductions are {', '.join(REDUCE_OPS)}.",
        placement=text,
    )


def check_placements(placements: Sequence[Placement], mesh_ndim: int, ndim: int) -> tuple[Placement, ...]:
    """The placements as a normalised tuple (negative shard dims resolved, one object per value), or an error.

    Raises :class:`PlacementCountError` when there is not one placement per mesh dim and :class:`PlacementError`
    for a shard dim that a tensor of ``ndim`` dims does not have, and for any class but torch's plain three.
    """
    listed = tuple(placements)
    if len(listed) != mesh_ndim:
        raise PlacementCountError(
            asked=f"place a tensor by {show_all(listed)}",
            found=f"{len(listed)} placements for a mesh of {mesh_ndim} dims",
            do="Give exactly one placement per mesh dim.",
            placements=listed,
            mesh_ndim=mesh_ndim,
        )
    return tuple(_check_one(placement, ndim) for placement in listed)


def _check_one(placement: Placement, ndim: int) -> Placement:
    # `type is`, not isinstance: torch's private strided shard is a Shard in some versions and splits differently.
    if type(placement) is Replicate:
        return REPLICATE
    if type(placement) is Partial and placement.reduce_op in REDUCE_OPS:
        return partial(placement.reduce_op)
    if type(placement) is Shard:
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if 0 <= dim < ndim:
            return shard(dim)
        raise PlacementError(
            asked=f"place a tensor of {ndim} dims by {show(placement)}",
            found=f"there is no dim {placement.dim}",
            do=f"Use a shard dim from {-ndim} to {ndim - 1}." if ndim else "A 0-dim tensor takes R or a Partial.",
            placement=placement,
            ndim=ndim,
        )
    raise PlacementError(
        asked=f"place a tensor by {placement!r}",
        found=f"a {type(placement).__name__} that shardwise does not know",
        do=f"Use Shard(dim), Replicate() or Partial(kind) with kind one of {', '.join(REDUCE_OPS)}.",
        placement=placement,
    )
