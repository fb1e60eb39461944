"""Placements: torch's own classes, their short form in tables and messages, and the checks on a list of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardwise.errors import PlacementCountError, PlacementError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.plurals import counted
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.private_torch import placements as torch_placements

__all__ = [
    "REPLICATE",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "check_placements",
    "is_strided",
    "parse_placement",
    "partial",
    "shard",
    "shard_dim",
    "show",
    "show_all",
    "split_factor",
    "strided_shard",
]

#: The one instance that rules and specs use.
REPLICATE = Replicate()
StridedShard = torch_placements.StridedShard


@cache
def shard(dim: int) -> Shard:
    """``Shard(dim)``, one object per dim."""
    return Shard(dim)


@cache
def partial(kind: str) -> Partial:
    """``Partial(kind)``, one object per kind."""
    return Partial(kind)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """``_StridedShard(dim, split_factor=split_factor)``, one object per value; ``Shard(dim)`` where the factor is 1."""
    return shard(dim) if split_factor == 1 else torch_placements.strided_shard(dim, split_factor)


def shard_dim(placement: Placement | None) -> int | None:
    """The tensor dim that a placement shards, as a whole or inside; ``None`` for one that shards none."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def split_factor(placement: Placement) -> int:
    """The number of pieces of which a placement shards each: 1 but for strided shards."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def is_strided(placements: Sequence[Placement | None]) -> bool:
    """Whether there is a strided shard among placements."""
    return StridedShard in map(type, placements)


def show(placement: Placement | None) -> str:
    """The short form used in tables and messages: ``S(0)``, ``_S(0, 4)``, ``R``, ``P(sum)``; ``-`` for no operand."""
    if placement is None:
        return "-"
    if isinstance(placement, StridedShard):
        return f"_S({placement.dim}, {placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else repr(placement)


def show_all(placements: Sequence[Placement | None]) -> str:
    """The short forms of a list, in brackets: ``[S(0), R]``."""
    return "[" + ", ".join(map(show, placements)) + "]"


_DIM = r"[0-9]{1,3}"  # a tensor has at most 64 dims


def parse_placement(text: str) -> Placement:
    """The placement that :func:`show` writes as ``text``; also reads ``P`` as ``P(sum)``."""
    word = text.strip()
    if word == "R":
        return REPLICATE
    head, opens, rest = word.partition("(")
    if bool(opens) != rest.endswith(")"):
        head = ""  # it is cut short
    inner = rest.removesuffix(")").strip()
    if head == "S" and re.fullmatch(_DIM, inner):
        return shard(int(inner))
    if head == "_S" and (strided := re.fullmatch(rf"({_DIM}), *([1-9][0-9]{{0,17}})", inner)):
        return strided_shard(int(strided[1]), int(strided[2]))
    if head == "P" and (inner or "sum") in REDUCE_OPS:
        return partial(inner or "sum")
    raise PlacementError(
        asked=f"read the placement {text!r}",
        found="it is not S(d), R or P(kind)",
        do=f"Write S(0), R or P(sum); the reductions are {', '.join(REDUCE_OPS)}.",
        placement=text,
    )


def _is_plain_class(placement: Placement) -> bool:
    # `type is`, not isinstance: a class of somebody else's may split differently.
    return type(placement) is Shard or (type(placement) is StridedShard and placement.split_factor >= 1)


def _what_it_is(placement: object) -> str:
    if isinstance(placement, type):
        return f"it is the class {placement.__name__}, and not a placement"
    if isinstance(placement, (Partial, Placement)):
        return f"a {type(placement).__name__} that shardwise does not know"
    return f"it is {kind_of(placement)}, and not a placement"


def check_placements(placements: Sequence[Placement], mesh_ndim: int, ndim: int) -> tuple[Placement, ...]:
    """The placements as a tuple with one object per value: ``Shard(-1)`` of a matrix becomes ``Shard(1)``.

    Raises :class:`PlacementCountError` unless there is one placement per mesh dim. Raises :class:`PlacementError` for a
    shard dim that a tensor of ``ndim`` dims does not have, and for any class but torch's ``Shard``, ``_StridedShard``,
    ``Replicate`` and ``Partial``.
    """
    listed = tuple(placements)
    if len(listed) != mesh_ndim:
        raise PlacementCountError(
            asked=f"place a tensor by {show_all(listed)}",
            found=f"{counted(len(listed), 'placement')} for a mesh of {counted(mesh_ndim, 'dim')}",
            do="Give exactly one placement per mesh dim.",
            placements=listed,
            mesh_ndim=mesh_ndim,
        )
    checked: list[Placement] = []
    for placement in listed:
        # `type is`, not isinstance: a class of somebody else's may split differently.
        if type(placement) is Shard and 0 <= placement.dim < ndim:  # the usual case
            checked.append(shard(placement.dim))
        elif type(placement) is Replicate:
            checked.append(REPLICATE)
        elif type(placement) is Partial and placement.reduce_op in REDUCE_OPS:
            checked.append(partial(placement.reduce_op))
        elif (dim := shard_dim(placement)) is None or not _is_plain_class(placement):
            raise PlacementError(
                asked=f"place a tensor by {placement!r}",
                found=_what_it_is(placement),
                do=f"Use Shard(dim), Replicate() or Partial(kind) with kind one of {', '.join(REDUCE_OPS)}.",
                placement=placement,
            )
        elif not -ndim <= dim < ndim:
            raise PlacementError(
                asked=f"place a tensor of {counted(ndim, 'dim')} by {show(placement)}",
                found=f"there is no dim {dim}",
                do=f"Use a shard dim from {-ndim} to {ndim - 1}." if ndim else "A 0-dim tensor takes R or a Partial.",
                placement=placement,
                ndim=ndim,
            )
        else:
            checked.append(strided_shard(dim % ndim, split_factor(placement)))
    return tuple(checked)
