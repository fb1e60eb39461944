"""Where gradients lie at the border of a local function: derived from where its arguments and results lie.

A local function gives the part ``y(r)`` of each result on rank ``r`` from the parts ``x(r)`` of its arguments. A global
result is a linear function of its parts, and so is each part of a global argument. So the gradient follows by the chain
rule, one mesh dim at a time:

* a sharded result: each part has its own part of the gradient; a sharded argument likewise;
* a partial sum: the whole gradient reaches each part, as ``Y = y(0) + y(1) + ...``; of an argument, each rank computes
  the whole gradient;
* a partial average: the same, divided by the number of ranks at a result, and multiplied by it at an argument;
* a replicated argument: the ranks' gradients add up to its gradient, so it is a partial sum;
* a replicated result is the same value on each rank, and counts once: its gradient is split as a partial sum.

Replicated and ``Partial("sum")`` are each other's gradients. There is one short cut: where all results are replicated
along a mesh dim, and the function does not communicate over it, all ranks along it do the same work on the same values.
Then each of them computes the whole gradient, and nothing needs to be added.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwise.errors import LocalGradientError, LocalPlacementError
from shardwise.kernel.placements import REPLICATE, Partial, Placement, Replicate, partial, shard_dim, show_all
from shardwise.kernel.reductions import LINEAR

__all__ = ["counted", "dual", "in_sums", "refuse_without_gradient", "same_work"]

Layout = tuple[Placement, ...]
_SUM = partial("sum")


def same_work(
    function: str,
    arguments: Sequence[tuple[str, Layout]],
    results: Sequence[tuple[str, Layout]],
    sizes: Sequence[int],
    communicates: Collection[int],
) -> frozenset[int]:
    """The mesh dims along which all ranks compute the same: all results are replicated there.

    ``arguments`` and ``results`` have names for messages. Raises :class:`LocalPlacementError` where results are to be
    replicated along a mesh dim that shards an argument, as no local function computes the same from different parts.
    """
    same = set()
    for m, size in enumerate(sizes):
        if m in communicates or not results or not all(isinstance(layout[m], Replicate) for _, layout in results):
            continue
        for name, layout in arguments:
            if size > 1 and not isinstance(layout[m], Replicate):
                raise LocalPlacementError(
                    asked=f"call {function} by local, with argument {name} {show_all(layout)} and result "
                    f"{results[0][0]} {show_all(results[0][1])}",
                    found=f"along mesh dim {m} the ranks have different parts of {name}, and every result is said to "
                    "be the same on all of them",
                    do='Say Partial("sum") or Shard(dim) in outputs=, or Replicate() in inputs=. If the function '
                    f"communicates over that mesh dim, say communicates=({m},).",
                    mesh_dim=m,
                    argument=name,
                )
        same.add(m)
    return frozenset(same)


def dual(layout: Layout, same: Collection[int]) -> Layout:
    """The placements of the gradients of the parts of an argument, and those in which a result's go to its parts.

    One table serves both, as each is the transpose of the other. An average has a factor besides: see :func:`counted`.
    """
    return tuple(_dual(p, m in same) for m, p in enumerate(layout))


def _dual(placement: Placement, is_same_work: bool) -> Placement:
    if shard_dim(placement) is not None:
        return placement
    return REPLICATE if isinstance(placement, Partial) or is_same_work else _SUM


def counted(layout: Layout, sizes: Sequence[int]) -> int:
    """By how much a part of a tensor counts less than a part of a sum: the ranks that an average is over."""
    count = 1
    for placement, size in zip(layout, sizes, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            count *= size
    return count


def in_sums(layout: Layout) -> Layout:
    """The same with sums in place of averages, whose number is counted apart."""
    return tuple(_SUM if isinstance(p, Partial) else p for p in layout)


def refuse_without_gradient(function: str, what: str, layout: Layout) -> None:
    """Raise :class:`LocalGradientError` for a partial max, min or product of a tensor that requires a gradient."""
    for placement in layout:
        if isinstance(placement, Partial) and placement.reduce_op not in LINEAR:
            raise LocalGradientError(
                asked=f"differentiate {function} by local, with {what} {show_all(layout)}",
                found=f"a part of a {placement.reduce_op} has a gradient that depends on the parts of the other ranks, "
                "so none can be derived from placements",
                do="Redistribute it to Replicate() or Shard(dim), or detach() it.",
                placements=layout,
            )
